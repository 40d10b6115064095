package jobs

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

// claim is the database's answer about a key.
type claim struct {
	id           int64
	created      bool
	kind, tenant string // of the first use
	digest       []byte
}

// The id is drawn here and not in the function, which has its owner's rights: the
// sequence is River's, and the caller has a right to it already.
const claimSQL = `
select metered.claim_job_key_plain($1::text, $2::text, $3::text, $4::text, $5::bytea, pg_catalog.nextval($6::text::regclass),
    $7::int)`

// A lateral function scan runs once per row, in the order of the arrays.
const claimManySQL = `
select c.id, c.created, c.first_kind, c.first_tenant, c.first_digest
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[]) as u (queue, key, kind, tenant, digest)
cross join lateral metered.claim_job_key(u.queue, u.key, u.kind, u.tenant, u.digest, pg_catalog.nextval($6::text::regclass), $7) c`

// claimed reads the answer of claim_job_key_plain about the key of p.
func (p *prepared) claimed(answer []byte) (claim, error) {
	if len(answer) > 0 && answer[0] == '[' {
		var c claim
		err := json.Unmarshal(answer, &[]any{&c.id, &c.kind, &c.tenant, &c.digest})
		return c, err
	}
	c := claim{created: true, kind: p.kind, tenant: p.tenant, digest: p.digest}
	err := json.Unmarshal(answer, &c.id)
	return c, err
}

// claimKeys claims the key of each job in one round trip, and returns the answers
// in the same order. Two calls with the same keys in another order cannot
// deadlock: it claims them sorted.
func (e *Enqueuer) claimKeys(ctx context.Context, tx pgx.Tx, keyed []*prepared) ([]claim, error) {
	wait := int32(e.wait / time.Millisecond)
	if len(keyed) == 1 {
		p := keyed[0]
		var claimed []byte
		err := answer.QueryRow(ctx, tx, e.claimSQL, p.opts.Queue, p.key, p.kind, p.tenant, p.digest,
			e.sequence, wait).Scan(&claimed)
		if err != nil {
			return nil, err
		}
		c, err := p.claimed(claimed)
		return []claim{c}, err
	}

	order := make([]int, len(keyed))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(keyed[a].opts.Queue, keyed[b].opts.Queue),
			cmp.Compare(keyed[a].key, keyed[b].key))
	})
	var queues, keys, kinds, tenants []string
	var digests [][]byte
	for _, i := range order {
		p := keyed[i]
		queues, keys, kinds = append(queues, p.opts.Queue), append(keys, p.key), append(kinds, p.kind)
		tenants, digests = append(tenants, p.tenant), append(digests, p.digest)
	}
	rows, err := answer.Query(ctx, tx, e.claimManySQL, queues, keys, kinds, tenants, digests, e.sequence, wait)
	if err != nil {
		return nil, err
	}
	claims, next := make([]claim, len(keyed)), 0
	var c claim
	_, err = pgx.ForEachRow(rows, []any{&c.id, &c.created, &c.kind, &c.tenant, &c.digest}, func() error {
		claims[order[next]] = c
		next++
		return nil
	})
	return claims, err
}
