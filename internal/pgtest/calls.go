package pgtest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

type note struct {
	N int `json:"n"`
}

func (note) Kind() string { return "note" }

// EveryCall makes each call that an application makes.
func EveryCall(t testing.TB, app *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	charge := budget.Charge{Scope: "s", Amount: 5, Limits: []budget.Limit{{Max: 100, Window: time.Hour}}}
	var token tokens.Minted
	require.NoError(t, pgx.BeginFunc(ctx, app, func(tx pgx.Tx) error {
		receipt, err := c.Budget.Charge(ctx, tx, charge)
		require.NoError(t, err)
		_, err = c.Budget.Credit(ctx, tx, budget.Credit{Scope: "s", Amount: 5})
		require.NoError(t, err)
		_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: receipt.Entries[0].Seq, Amount: 2})
		require.NoError(t, err)
		token, err = c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Minute})
		require.NoError(t, err)
		_, err = c.Tokens.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "t", TTL: time.Minute})
		require.NoError(t, err)
		_, err = c.Tokens.RevokeSubject(ctx, tx, "p", "t")
		require.NoError(t, err)
		_, err = c.Tokens.Inspect(ctx, tx, "p", "s", token.Token.Reveal())
		return err
	}))
	_, err := metered.Do(ctx, c, metered.Command{
		ID: "op", Charges: []budget.Charge{charge}, Sticky: []budget.Charge{{Scope: "tries", Amount: 1}},
		Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: token.Token.Reveal()},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		_, err := tx.Enqueue(ctx, note{N: 1}, &jobs.Options{Key: "k"})
		require.NoError(t, err)
		job, err := tx.Enqueue(ctx, note{N: 2}, nil)
		return job.JobID, err
	})
	require.NoError(t, err)
	for range 2 { // then a replay
		_, err = metered.Do[any](ctx, c, metered.Command{ID: "early", EarlyRelease: true, Charges: []budget.Charge{charge}}, nil)
		require.NoError(t, err)
	}
	_, err = c.Jobs.Find(ctx, app, "default", "k")
	require.NoError(t, err)
	_, err = c.Lookup(ctx, app, "", "op")
	require.NoError(t, err)
	_, err = c.Budget.Check(ctx, app, charge)
	require.NoError(t, err)
	_, err = c.Budget.Usage(ctx, app, budget.Query{Scope: "s"})
	require.NoError(t, err)
	for _, err := range c.Budget.Entries(ctx, app, "s", budget.EntriesOptions{}) {
		require.NoError(t, err)
	}
	report, err := c.Budget.Verify(ctx, app, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// BigTablesSQL is a scope with 15,000 charges and 12,500 refunds of them, 5,000 holds in another,
// and as many tokens, keys and operations.
const BigTablesSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, ref)
	select g, 2, metered.clock() - interval '30 min' + g * interval '40 ms', 2 * g, 0, 0, 0, 0, 'c'::"char", 'refunded', null::bigint from generate_series(1, 15000) g
	union all select 15000 + g, 1, metered.clock() - interval '10 min' + g * interval '1 ms', 30000, g, 0, 0, 0, 'r', 'refunded', g from generate_series(1, 12500) g;
insert into metered.refund_sum (scope, level, block, amount)
	select 'refunded', lv, g >> (4 * lv), count(*) from generate_series(1::bigint, 12500) g, generate_series(0, 15) lv
	where lv = 0 or g >> (4 * lv) > 0 group by lv, g >> (4 * lv);
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold)
	select g, 1, metered.clock() - interval '30 min' + g * interval '1 ms', 0, 0, 0, g, 0, 'h', 'held', metered.clock() + interval '1 h', 'old ' || g from generate_series(1, 5000) g;
insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
	select metered.clock(), metered.clock() + interval '1 h', metered.clock() + interval '1 h', metered.clock() + interval '1 h', 1, 'h', '', 'old ' || g, 'ann', '', array[metered._scope_key('held')]
	from generate_series(1, 5000) g;
insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) select h.no, h.keys[1], 1, 1, h.due, 'held', 1 from metered.holds h;
insert into metered.hold_events (hold, at, deadline, version, kind) select h.no, h.placed_at, h.deadline, 1, 'h' from metered.holds h;
insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
	select sha256(g::text::bytea), metered.clock(), metered.clock() + interval '1 h', 1, 'p', 's' || g from generate_series(1, 5000) g;
insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest)
	select g, metered.clock() - interval '1 h', 'default', 'old ' || g, 'k', '', '' from generate_series(1, 5000) g;
insert into metered.operations (at, tenant, id, fingerprint, result)
	select metered.clock() - interval '1 h', '', 'old ' || g, '', '1' from generate_series(1, 5000) g`
