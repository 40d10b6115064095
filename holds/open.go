package holds

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// sessionPrefix begins the ids of the holds of sessions. A digest of the operation's id, "_" and
// 16 characters of the session's own follow (uuidv7.NewShort). 0.1.0 wrote a UUID there.
const sessionPrefix = "session_"

const openSQL = `
select status, placed_at, deadline, seqs, ats, refused, stored, crossed
from metered.open_session($1::metered.new_command, $2::metered.new_hold, $3::metered.new_charge[], $4::interval, $5::int, $6::metered.origin, $7::text)`

const openPlainSQL = `
select metered.open_session_plain($1::text, $2::bigint, $3::timestamptz, $4::interval, $5::text, $6::text, $7::text, $8::bytea,
    $9::timestamptz, $10::interval, $11::interval, $12::interval, $13::json, $14::text, $15::bigint, $16::bigint, $17::bigint,
    $18::interval, $19::timestamptz, $20::timestamptz, $21::jsonb, $22::text, $23::text, $24::text, $25::interval, $26::int, $27::text)`

// idsOfSession begins the ids of the holds of an operation's sessions.
func idsOfSession(operation string) string {
	sum := sha256.Sum256([]byte(operation))
	return fmt.Sprintf("%s%x_", sessionPrefix, sum[:16])
}

const ofSessionSQL = `
select metered.hold_json(h.no, c.now), h.fingerprint
from (select metered.clock() as now) c, metered.holds h
where h.tenant = $1 and h.id >= $2 and h.id < $3 and h.state = 'h' and h.due > c.now and ($4 = '' or h.holder = $4)
limit 1`

// ofSession returns the open hold of an operation's session, and its fingerprint, or ErrUnknown.
func (b *Book) ofSession(ctx context.Context, db budget.Querier, tenant, operation,
	holder string) (h Hold, fingerprint []byte, err error) {
	if err := checkNames(tenant, holder); err != nil {
		return Hold{}, nil, err
	}
	var raw []byte
	ids := idsOfSession(operation)
	err = answer.QueryRow(ctx, db, b.sql.ofSession, tenant, ids, ids+"~", holder).Scan(&raw, &fingerprint)
	if errors.Is(err, pgx.ErrNoRows) {
		return Hold{}, nil, unknown(false)
	}
	if err != nil {
		return Hold{}, nil, failed("resume", err)
	}
	err = h.decode(raw)
	return h, fingerprint, err
}

// prepareOpen validates the request of a session's hold, of its operation's tenant. Each call makes
// another id.
func (b *Book) prepareOpen(r Placement, o *ledger.Opening) (*call, error) {
	r.ID, r.opening = idsOfSession(o.Operation)+uuidv7.NewShort(), o
	c, err := b.preparePlace(r)
	if err != nil {
		return nil, err
	}
	place := c.Args
	if c.SQL == b.sql.placePlain {
		c.SQL = b.sql.openPlain
		c.Args = func(s ledger.Sending) []any {
			args := slices.Concat(o.Plain(), place(s))
			return args[:len(args)-1] // a refusal is an answer
		}
		return c, nil
	}
	c.SQL = b.sql.open
	c.Args = func(s ledger.Sending) []any { return slices.Concat([]any{o.Command()}, place(s)[:6]) }
	return c, nil
}
