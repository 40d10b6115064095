package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
)

type holdsCall = ledger.Call[[]holds.Hold]

// Steps that the packages lend to their siblings.
var (
	prepareCharges = lend.Borrow[interface {
		Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
	}]("budget").Charges
	lentByHolds = lend.Borrow[interface {
		Place(b *holds.Book, r holds.Placement) (*ledger.Call[[]holds.Hold], error)
		Claim(b *holds.Book, c holds.Claim) (*ledger.Call[[]holds.Hold], error)
		Capture(b *holds.Book, c holds.Capture) (*ledger.Call[[]holds.Hold], error)
		Release(b *holds.Book, r holds.Release) (*ledger.Call[[]holds.Hold], error)
		Extend(b *holds.Book, e holds.Extend) (*ledger.Call[[]holds.Hold], error)
		Return(b *holds.Book, r holds.Return) (*ledger.Call[[]holds.Hold], error)
	}]("holds")
	placeHold    = lentByHolds.Place
	claimHold    = lentByHolds.Claim
	captureHolds = lentByHolds.Capture
	releaseHolds = lentByHolds.Release
	extendHolds  = lentByHolds.Extend
	returnHolds  = lentByHolds.Return
)

// inState is found in the *StateError of a hold in that state.
func inState(s holds.State) error { return fault.New("hold_"+string(s), "a hold that is "+string(s)) }

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// fixture is a book in a database of its own, with a clock that stands at noon.
type fixture struct {
	*testing.T
	pool   *pgxpool.Pool
	clock  *pgtest.Clock
	ledger *budget.Ledger
	book   *holds.Book
}

func setUp(t *testing.T, cfg holds.Config) *fixture {
	t.Helper()
	pool := pgtest.Open(t)
	return on(t, pool, cfg, pgtest.SetClock(t, pool, noon))
}

func on(t *testing.T, pool *pgxpool.Pool, cfg holds.Config, clock *pgtest.Clock) *fixture {
	t.Helper()
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	book, err := holds.New(ledger, cfg)
	require.NoError(t, err)
	return &fixture{T: t, pool: pool, clock: clock, ledger: ledger, book: book}
}

// as is the fixture of a subtest, in the same database.
func (f *fixture) as(t *testing.T) *fixture {
	one := *f
	one.T = t
	return &one
}

// do runs fn in a transaction of its own, which commits if fn returns no error.
func do[R any](f *fixture, fn func(ctx context.Context, tx pgx.Tx) (R, error)) (r R, err error) {
	err = pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error {
		r, err = fn(f.Context(), tx)
		return err
	})
	return r, err
}

func (f *fixture) place(r holds.Placement) (holds.Hold, error) {
	f.Helper()
	if r.TTL == 0 {
		r.TTL = time.Minute
	}
	return do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) { return f.book.Place(ctx, tx, r) })
}

func (f *fixture) mustPlace(r holds.Placement) holds.Hold {
	f.Helper()
	h, err := f.place(r)
	require.NoError(f, err)
	return h
}

func (f *fixture) claim(c holds.Claim) (holds.Hold, error) {
	f.Helper()
	if c.TTL == 0 {
		c.TTL = time.Minute
	}
	return do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) { return f.book.Claim(ctx, tx, c) })
}

// claimed is the active claim of a key.
func (f *fixture) claimed(key holds.Key) holds.Hold {
	f.Helper()
	all, err := f.book.Claimed(f.Context(), f.pool, "", key)
	require.NoError(f, err)
	require.Len(f, all, 1)
	return all[key]
}

func (f *fixture) capture(c holds.Capture) ([]holds.Hold, error) {
	f.Helper()
	return do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return f.book.Capture(ctx, tx, c) })
}

func (f *fixture) release(ids ...string) ([]holds.Hold, error) {
	f.Helper()
	return do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Release(ctx, tx, holds.Release{IDs: ids})
	})
}

func (f *fixture) extend(by time.Duration, ids ...string) ([]holds.Hold, error) {
	f.Helper()
	return do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Extend(ctx, tx, holds.Extend{IDs: ids, By: by})
	})
}

func (f *fixture) charge(charges ...budget.Charge) (budget.Receipt, error) {
	f.Helper()
	return do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		return f.ledger.Charge(ctx, tx, charges...)
	})
}

func (f *fixture) get(id string) holds.Hold {
	f.Helper()
	h, err := f.book.Get(f.Context(), f.pool, "", id, "")
	require.NoError(f, err)
	return h
}

// usage is the units of a scope that are spent and held.
func (f *fixture) usage(scope string) (used, held int64) {
	f.Helper()
	u, err := f.ledger.Usage(f.Context(), f.pool, budget.Query{Scope: scope})
	require.NoError(f, err)
	return u[0].Used, u[0].Held
}

// verify checks the ledger, that the held units of each scope are the sum of its open lines, that each hold agrees with
// its history, and that no row of a deleted hold is left.
func (f *fixture) verify() {
	f.Helper()
	report, err := f.ledger.Verify(f.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(f, err)
	require.Empty(f, report.Differences)
	f.sums()
	require.Zero(f, queryRow[int](f, f.pool, `select count(*) from (select hold from metered.hold_lines union all select hold from metered.hold_events) l
		where not exists (select from metered.holds h where h.no = l.hold)`), "lines and events of holds that there are no more")
	for page := (holds.Filter{}); ; {
		list, err := f.book.List(f.Context(), f.pool, page)
		require.NoError(f, err)
		for _, h := range list.Holds {
			f.rebuilds(h)
		}
		if page.After = list.Next; list.Next == "" {
			return
		}
	}
}

func (f *fixture) sums() {
	f.Helper()
	checkSums(f, f.Context(), f.pool, "%")
}

func checkSums(t require.TestingT, ctx context.Context, db budget.Querier, like string) {
	rows, err := db.Query(ctx, `
		select coalesce(s.scope, l.scope)
		from (select distinct on (scope) scope, held, next_due from metered.ledger where scope like $1 order by scope, seq desc) s
		full join (select x.scope, coalesce(sum(x.open) filter (where x.due >= t.next_due), 0) as open,
				bool_or(x.open > 0 and (x.due >= t.next_due) is not true and x.due > t.at) as late
			from metered.hold_lines x, lateral (select * from metered.ledger y where y.scope = x.scope order by y.seq desc limit 1) t
			where x.scope like $1 group by x.scope) l using (scope)
		where coalesce(s.held, 0) <> coalesce(l.open, 0) or l.late
		   or (s.held > 0) <> (s.next_due is not null)
		union all
		select 'hold ' || h.id from metered.holds h,
			lateral (select array_agg(distinct l.key order by l.key) as keys, bool_or(l.scope like $1) as mine from metered.hold_lines l where l.hold = h.no) l
		where l.mine and (l.keys <> h.keys or (h.state = 'h') <> (h.ended_at is null))`, like)
	require.NoError(t, err)
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, wrong, "scopes whose held is not the sum of their lines that are not freed, or that have freed one that is not due; holds at odds with themselves")
}

func (f *fixture) rebuilds(h holds.Hold) {
	f.Helper()
	rebuilds(f, f.Context(), f.book, f.pool, h)
}

// rebuilds checks a hold against its history. That its time is over may not have been
// recorded yet.
func rebuilds(t require.TestingT, ctx context.Context, book *holds.Book, db budget.Querier, h holds.Hold) {
	history, err := book.History(ctx, db, h.Tenant, h.ID, "")
	require.NoError(t, err)
	want, err := holds.Rebuild(holds.Hold{}, history)
	require.NoError(t, err)
	require.Equal(t, h.Version, want.Version)
	for i := range history { // from any snapshot it is the same
		snapshot, err := holds.Rebuild(holds.Hold{}, history[:i+1])
		require.NoError(t, err)
		snapshot.Created, snapshot.Charges = true, []budget.Posted{{}} // as the call that placed it says
		from, err := holds.Rebuild(snapshot, history[i/2:])
		require.NoError(t, err)
		from.Now = want.Now
		require.Equal(t, want, from)
	}
	if h.State == holds.Expired && want.State == holds.Held {
		require.False(t, h.Now.Before(want.Due))
		want.State, want.EndedAt = holds.Expired, want.Due
		for i := range want.Lines {
			want.Lines[i].Open = 0
			want.Lines[i].Captured = max(want.Lines[i].Captured, want.Lines[i].AtLeast)
		}
	}
	want.Now = h.Now
	require.Equal(t, h, want)
}

func capacity(scope string, amount, limit int64) holds.Line {
	return holds.Line{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(limit)}}
}

func refund(f *fixture, ids ...string) func(context.Context, pgx.Tx) ([]holds.Hold, error) {
	return func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: ids, All: true})
	}
}
