package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The oracle: in the same state, a batch has the answers and entries that its charges have one by one. Before it come
// holds that are due, refunds, credits, purges, clocks that were set and repaired. The short form finds a batch that forgets its
// own earlier charges (_write_plain without before).
func TestChargeEach_IsAsOneByOne(t *testing.T) {
	t.Parallel()
	o := newOracle(t)
	codes := []string{"budget_exceeded", "budget_clock", "budget_window_purged", "scope_unknown"}
	unmet := func() bool { // chance may leave one out for long
		return slices.ContainsFunc(codes, func(code string) bool { return o.codes[code] == 0 })
	}
	least := pgtest.Size(300, 900)
	for n := 0; n < pgtest.Size(75, 360) || n < 3000 && (unmet() || o.made <= least); n++ {
		o.history(4)
		o.compare(isolations[n%3])
	}
	t.Logf("%d charges: %d made, refused or failed %v", o.made+o.refused(), o.made, o.codes)
	require.Greater(t, o.made, least)
	for _, code := range codes {
		require.NotZero(t, o.codes[code], code)
	}
	require.NotZero(t, count(t, o.pool, `metered.ledger where kind = 'x'`), "a batch must have met holds that were due")
	requireVerified(t, o.pool, o.l)
}

type oracle struct {
	*testing.T
	pool  *pgxpool.Pool
	l     *budget.Ledger
	book  *holds.Book
	clock *pgtest.Clock
	rand  *rand.Rand
	made  int
	codes map[string]int
}

func newOracle(t *testing.T) *oracle {
	o := &oracle{T: t, rand: pgtest.Random(t), codes: map[string]int{}}
	o.pool, o.l, o.clock = open(t)
	var err error
	o.book, err = holds.New(o.l, holds.Config{})
	require.NoError(t, err)
	_, err = pgtest.InTx(t.Context(), o.pool, func(tx pgx.Tx) (any, error) { return o.l.Create(t.Context(), tx, "s0", "s1", "s2", "s3") })
	require.NoError(t, err)
	return o
}

func (o *oracle) refused() (n int) {
	for _, m := range o.codes {
		n += m
	}
	return n
}

func (o *oracle) scope() string { return fmt.Sprintf("s%d", o.rand.IntN(12)) }

// history lets things happen that a batch may meet.
func (o *oracle) history(acts int) {
	ctx := o.Context()
	for range acts {
		scope := o.scope()
		var err error
		switch o.rand.IntN(12) {
		case 0, 1:
			o.clock.Advance(time.Duration(o.rand.Int64N(int64(20 * time.Minute))))
		case 2:
			mustCredit(o, o.pool, o.l, scope, 1+o.rand.Int64N(20))
		case 3, 4:
			err = refund(ctx, o.pool, o.l, scope, 1+o.rand.Int64N(40), 1)
			for _, fine := range []error{budget.ErrUnknownEntry, budget.ErrEntryPurged, budget.ErrNotCharge, budget.ErrRefundExceeds} {
				if errors.Is(err, fine) {
					err = nil
				}
			}
		case 5, 6, 7:
			_, err = pgtest.InTx(ctx, o.pool, func(tx pgx.Tx) (holds.Hold, error) {
				return o.book.Place(ctx, tx, holds.Placement{TTL: time.Second + time.Duration(o.rand.IntN(1_800_000))*time.Millisecond,
					Lines: []holds.Line{{Scope: scope, Amount: 1 + o.rand.Int64N(9)}, {Scope: scope + "'", Amount: 1}}})
			})
		case 8:
			if o.rand.IntN(4) == 0 {
				o.clock.Advance(-time.Duration(o.rand.Int64N(int64(3 * time.Minute))))
			}
		case 9:
			_, err = pgtest.InTx(ctx, o.pool, func(tx pgx.Tx) (budget.ClockState, error) {
				return o.l.RepairClock(ctx, tx, scope, budget.Note{})
			})
		case 10:
			if o.rand.IntN(6) == 0 {
				purge(o, o.pool, o.l, 2*time.Hour)
			}
		default:
			n := 1 + o.rand.IntN(20)
			chargeMany(o, o.pool, o.l, scope, n)
		}
		require.NoError(o, err)
	}
}

func (o *oracle) charges() []budget.Charge {
	charges := make([]budget.Charge, 1+o.rand.IntN(24))
	for i := range charges {
		c := budget.Charge{Scope: o.scope(), Amount: 1 + o.rand.Int64N(6), MustExist: o.rand.IntN(30) == 0, Note: budget.Note{Reason: fmt.Sprint("charge ", i)}}
		if o.rand.IntN(20) == 0 {
			c.Scope = fmt.Sprint("new ", o.rand.Int())
		}
		for range o.rand.IntN(3) {
			switch o.rand.IntN(4) {
			case 0:
				c.Limits = append(c.Limits, budget.Lifetime(o.rand.Int64N(2000)))
			case 1:
				c.Limits = append(c.Limits, budget.PerWindow(o.rand.Int64N(200), 5*time.Hour))
			default:
				c.Limits = append(c.Limits, budget.PerWindow(o.rand.Int64N(100), time.Duration(1+o.rand.IntN(60))*time.Minute))
			}
		}
		charges[i] = c
	}
	return charges
}

// wrote are the entries that a transaction has written and sees, beyond the committed ones.
const wroteSQL = `select coalesce(jsonb_agg(to_jsonb(l) - array['next_due', 'anchor_at', 'anchor_spent'] order by l.scope, l.seq), '[]')::text from metered.ledger l
	where l.xmin::text::bigint >= (pg_current_xact_id_if_assigned()::text::bigint & 4294967295)`

func (o *oracle) compare(iso pgx.TxIsoLevel) {
	ctx := o.Context()
	tx, err := o.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: iso})
	require.NoError(o, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	charges := o.charges()
	_, err = tx.Exec(ctx, "select pg_current_xact_id(); savepoint one_by_one", pgx.QueryExecModeSimpleProtocol)
	require.NoError(o, err)
	want := make([]budget.Result, len(charges))
	for i, c := range charges {
		inner, err := tx.Begin(ctx)
		require.NoError(o, err)
		r, err := o.l.Charge(ctx, inner, c)
		if want[i].Err = err; err != nil {
			require.NoError(o, inner.Rollback(ctx))
			continue
		}
		require.NoError(o, inner.Commit(ctx))
		want[i].Posted = r.Entries[0]
	}
	var wantRows, rows string
	require.NoError(o, tx.QueryRow(ctx, wroteSQL).Scan(&wantRows))
	_, err = tx.Exec(ctx, "rollback to savepoint one_by_one")
	require.NoError(o, err)
	got, err := o.l.ChargeEach(ctx, tx, charges...)
	require.NoError(o, err)
	require.NoError(o, tx.QueryRow(ctx, wroteSQL).Scan(&rows))
	for i := range got {
		require.Equal(o, want[i].Posted, got[i].Posted, "%+v", charges[i])
		if want[i].Err == nil {
			require.NoError(o, got[i].Err, "%+v", charges[i])
			o.made++
			continue
		}
		require.Error(o, got[i].Err, "%+v", charges[i])
		code := metered.Code(want[i].Err)
		require.Equal(o, code, metered.Code(got[i].Err), "%v, and not %v", got[i].Err, want[i].Err)
		o.codes[code]++
		var exceeded *budget.ExceededError
		if errors.As(want[i].Err, &exceeded) {
			require.Equal(o, want[i].Err, got[i].Err)
		}
	}
	require.JSONEq(o, wantRows, rows)
	require.NoError(o, tx.Commit(ctx))
}
