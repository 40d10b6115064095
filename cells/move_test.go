package cells_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// The places of three cells: in one database, and each in its own.
func places(t *testing.T) map[string][]*pgxpool.Pool {
	return map[string][]*pgxpool.Pool{"one database": {database(t)}, "three": {database(t), database(t), database(t)}}
}

// All that a tenant has is there after moves to each cell and back: it replays, ends and adds up as before.
func TestMove_TakesEverythingAlong(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, pools...)
			r, stale := w.router(), w.router()
			all := fill(t, r)
			before := w.lives("acme")
			seen := map[int]bool{before: true}
			for _, by := range []int{1, 1, 1, 2} {
				to := (w.lives("acme") + by) % 3
				w.move(r, "acme", to)
				require.Equal(t, to, w.lives("acme"))
				seen[to] = true
				all.check(t, r)
				all.check(t, stale)
			}
			w.verified()
			require.Len(t, seen, 3)
			all.end(t, stale)
			w.move(r, "acme", before)
			require.Equal(t, before, w.lives("acme"))
			w.verified()
		})
	}
}

// filled is a tenant with a row in each table.
type filled struct {
	token, used *tokens.Token
	first       metered.Outcome[string]
	command     metered.Command
	claim       holds.Hold
	usage       []budget.Usage
	balance     wallet.Balance
}

var windowed = []budget.Limit{budget.PerWindow(1_000, time.Hour), budget.Lifetime(5_000)}

var cancelled = wallet.Change{Wallet: "acme/plan", Reference: "change", Plan: "plan", AtEnd: true}

func fill(t *testing.T, r *cells.Router) *filled {
	f := &filled{}
	mint := func(c *metered.Client, tx pgx.Tx) *tokens.Token {
		m, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "acme/ann", TTL: time.Hour, Payload: json.RawMessage(`{"b":1,"a":2}`)})
		require.NoError(t, err)
		return &m.Token
	}
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		f.token, f.used = mint(c, tx), mint(c, tx)
		_, err := c.Budget.Create(t.Context(), tx, "acme/declared")
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), fmt.Sprintf(`insert into %[1]s.uploads (tenant, name, size) values ('acme', 'a', 3), ('other', 'b', 4);
			insert into %[1]s.pages values ('a', 1), ('b', 1)`, schemaOf(t, tx)), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		return nil
	})
	f.command = metered.Command{
		ID: "first", Tenant: "acme", Name: "upload", Input: 7, Charges: []budget.Charge{{Scope: "acme/uploads", Amount: 40, Limits: windowed}},
		Token: &metered.Redeem{Purpose: "upload", Subject: "acme/ann", Presented: f.used.Reveal()},
		Holds: []holds.Placement{{Tenant: "acme", ID: "kept", Lines: []holds.Line{{Scope: "acme/uploads", Amount: 25, Limits: windowed}}, TTL: time.Hour}},
	}
	var err error
	f.first, err = do(t.Context(), r, f.command, func(context.Context, *metered.Tx) (string, error) { return "stored", nil })
	require.NoError(t, err)
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
		posted, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "acme", Amount: 9, Note: budget.Note{Actor: "ann"}})
		require.NoError(t, err)
		_, err = c.Budget.Refund(t.Context(), tx, budget.Refund{Scope: "acme", Seq: posted.Entries[0].Seq, Amount: 4})
		require.NoError(t, err)
		f.claim, err = c.Holds.Claim(t.Context(), tx, holds.Claim{Tenant: "acme", Key: holds.Key{Type: "name", Value: "bob/x"}, Holder: "ann", TTL: time.Hour})
		require.NoError(t, err)
		done, err := c.Holds.Place(t.Context(), tx, holds.Placement{Tenant: "acme", Lines: []holds.Line{{Scope: "acme/seats", Amount: 3}}, TTL: time.Hour})
		require.NoError(t, err)
		_, err = c.Holds.Capture(t.Context(), tx, holds.Capture{Tenant: "acme", IDs: []string{done.ID}, All: true})
		require.NoError(t, err)
		book, err := wallet.New(c.Budget, wallet.Config{})
		require.NoError(t, err)
		_, err = book.Grant(t.Context(), tx, wallet.Grant{Wallet: "acme/wallet", Amount: 500, Ends: wallet.After(time.Hour), Reference: "g1", Category: "paid"})
		require.NoError(t, err)
		_, err = c.Budget.Charge(t.Context(), tx, book.Charge("acme/wallet", 120))
		require.NoError(t, err)
		_, err = book.Grant(t.Context(), tx, wallet.Grant{Wallet: "acme/plan", Amount: 500, Reference: "plan", Ends: wallet.EachPeriod(budget.PerPeriod(1, 1000*time.Hour, time.Now()).Period)})
		require.NoError(t, err)
		changed, err := book.Change(t.Context(), tx, cancelled)
		require.NoError(t, err)
		require.False(t, changed.Replayed)
		carver, err := leases.NewCarver(c.Budget)
		require.NoError(t, err)
		_, err = carver.Carve(t.Context(), tx, leases.Carving{Child: "acme/run/1", From: budget.Charge{Scope: "acme/uploads", Amount: 30}, TTL: time.Hour})
		return err
	})
	f.look(t, r, &f.usage, &f.balance)
	return f
}

// look reads usage and balance in a transaction of the tenant.
func (f *filled) look(t *testing.T, r *cells.Router, usage *[]budget.Usage, balance *wallet.Balance) {
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
		*usage, err = c.Budget.Usage(t.Context(), tx, budget.Query{Scope: "acme"}, budget.Query{Scope: "acme/uploads", Window: time.Hour}, budget.Query{Scope: "acme/seats"},
			budget.Query{Scope: "acme/run/1"}, budget.Query{Scope: "acme/wallet"})
		require.NoError(t, err)
		book, err := wallet.New(c.Budget, wallet.Config{})
		require.NoError(t, err)
		*balance, err = book.Balance(t.Context(), tx, "acme/wallet")
		return err
	})
}

func schemaOf(t *testing.T, tx pgx.Tx) string {
	return pgtest.Value[string](t, tx, `select relnamespace::regnamespace::text from pg_locks l join pg_class c on c.oid = l.relation
		where l.pid = pg_backend_pid() and c.relname = 'cell' limit 1`)
}

func (f *filled) check(t *testing.T, r *cells.Router) {
	t.Helper()
	out, err := do(t.Context(), r, f.command, func(context.Context, *metered.Tx) (string, error) { panic("the function ran") })
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.Equal(t, f.first.Result, out.Result)
	require.Equal(t, f.first.Holds[0].Deadline, out.Holds[0].Deadline)
	var usage []budget.Usage
	var balance wallet.Balance
	f.look(t, r, &usage, &balance)
	for i := range usage {
		usage[i].HoldDue = f.usage[i].HoldDue // a duration from now
	}
	require.Equal(t, f.usage, usage)
	require.Equal(t, f.balance.Lots, balance.Lots)
	require.NoError(t, r.Run(t.Context(), "acme", func(ctx context.Context, c *metered.Client) error {
		return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			book, err := wallet.New(c.Budget, wallet.Config{})
			require.NoError(t, err)
			changed, err := book.Change(ctx, tx, cancelled)
			require.NoError(t, err)
			require.True(t, changed.Replayed)
			grant, err := c.Tokens.Inspect(ctx, tx, "upload", "acme/ann", f.token.Reveal())
			require.NoError(t, err)
			require.Equal(t, `{"b":1,"a":2}`, string(grant.Payload))
			_, err = c.Tokens.Inspect(ctx, tx, "upload", "acme/ann", f.used.Reveal())
			require.ErrorIs(t, err, tokens.ErrInvalid)
			_, err = c.Holds.Claim(ctx, tx, holds.Claim{Tenant: "acme", Key: holds.Key{Type: "name", Value: "bob/x"}, Holder: "eve", TTL: time.Hour})
			require.ErrorIs(t, err, holds.ErrTaken)
			require.Equal(t, 6, pgtest.Value[int](t, tx, `select doubled from `+schemaOf(t, tx)+`.uploads join `+schemaOf(t, tx)+`.pages on upload = name where name = 'a'`))
			return nil
		})
	}))
}

// end ends all that is open, from a router that knows an old place.
func (f *filled) end(t *testing.T, r *cells.Router) {
	t.Helper()
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Tokens.Consume(t.Context(), tx, "upload", "acme/ann", f.token.Reveal())
		require.NoError(t, err)
		h, err := c.Holds.Capture(t.Context(), tx, holds.Capture{Tenant: "acme", IDs: []string{"kept"}, All: true})
		require.NoError(t, err)
		require.Equal(t, f.first.Holds[0].Deadline, h[0].Deadline)
		_, err = c.Holds.Release(t.Context(), tx, holds.Release{Tenant: "acme", IDs: []string{f.claim.ID}})
		require.NoError(t, err)
		carver, err := leases.NewCarver(c.Budget)
		require.NoError(t, err)
		l, err := carver.End(t.Context(), tx, "acme/run/1", budget.Note{Actor: "ann"})
		require.NoError(t, err)
		require.False(t, l.SettledAt.IsZero())
		return nil
	})
}

// A move waits for each transaction that has entered the tenant, whatever it writes, and holds up those that come.
func TestMove_WaitsForWhoeverHasEntered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t), database(t))
	r := w.router()
	to := 1 - r.First("acme")
	var moving, late <-chan error
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		moving = pgtest.Going(func() error {
			return w.router().Move(context.Background(), cells.Move{Tenant: "acme", To: to, LockTimeout: time.Minute})
		})
		pgtest.WaitAdvisory(t, cells.PoolOf(c), 1)
		late = pgtest.Going(func() error {
			_, err := do(context.Background(), w.router(), metered.Command{ID: "late", Tenant: "acme"}, func(context.Context, *metered.Tx) (int, error) { return 1, nil })
			return err
		})
		pgtest.WaitAdvisory(t, cells.PoolOf(c), 2)
		_, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "p", Subject: "acme", TTL: time.Hour})
		return err
	})
	require.NoError(t, <-moving)
	require.NoError(t, <-late)
	require.Equal(t, to, w.lives("acme"))
	require.Equal(t, 1, pgtest.Count(t, w.pools[to], w.schemas[to]+".tokens"))
	require.Equal(t, 1, pgtest.Count(t, w.pools[to], w.schemas[to]+".operations"))
}

// A transaction that did not enter its tenant locks the row of the last entry, for which a move waits: what it charges moves along.
func TestMove_WaitsForAChargeOfATransactionThatDidNotEnter(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t), database(t))
	r := w.router()
	from := r.First("acme")
	charge := budget.Charge{Scope: "acme/hot", Amount: 1, Limits: []budget.Limit{budget.Lifetime(10)}}
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, charge)
		return err
	})
	c, err := r.Client("acme")
	require.NoError(t, err)
	var moving <-chan error
	require.NoError(t, pgx.BeginFunc(t.Context(), cells.PoolOf(c), func(tx pgx.Tx) error {
		if _, err := c.Budget.Charge(t.Context(), tx, charge); err != nil {
			return err
		}
		locked := w.schemas[from] + ".ledger where xmax::text <> '0'"
		require.Equal(t, 1, pgtest.Count(t, w.pools[from], locked))
		moving = pgtest.Going(func() error {
			return w.router().Move(context.Background(), cells.Move{Tenant: "acme", To: 1 - from, LockTimeout: time.Minute})
		})
		pgtest.WaitQueued(t, cells.PoolOf(c), 1)
		return nil
	}))
	require.NoError(t, <-moving)
	require.Equal(t, 1-from, w.lives("acme"))
	require.Equal(t, 2, pgtest.Count(t, w.pools[1-from], w.schemas[1-from]+".ledger"))
	require.Zero(t, pgtest.Count(t, w.pools[from], w.schemas[from]+".ledger"))
}

// Whether a schema is a cell is a constant of plans: SetUp has sessions that charged before make
// theirs anew.
func TestSetUp_IsKnownToSessionsThatChargedBefore(t *testing.T) {
	t.Parallel()
	w := &world{TB: t, pools: []*pgxpool.Pool{database(t)}, schemas: []string{cellSchema(0)}}
	c := w.client(0, w.pools[0])
	conn, err := w.pools[0].Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	charge := func() (locked int) {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		_, err = c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "acme/hot", Amount: 1})
		require.NoError(t, err)
		locked = pgtest.Count(t, w.pools[0], w.schemas[0]+".ledger where xmax::text <> '0'")
		require.NoError(t, tx.Commit(t.Context()))
		return locked
	}
	for range 7 { // the last ones by plans that stay
		require.Zero(t, charge(), "the short way locks no entry")
	}
	require.NoError(t, w.router().SetUp(t.Context()))
	require.Equal(t, 1, charge(), "a move waits for whoever locked an entry")
}

// Each entry is in the feed of one cell: the one where it had its number. A consumer there has it
// before the tenant may leave.
func TestMove_EachEntryIsInTheFeedOfOneCell(t *testing.T) {
	t.Parallel()
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			w := newWorld(t, 3, pools...)
			r := w.router()
			consumed := map[string]int{}
			consume := func() {
				for i, pool := range w.pools {
					l := w.client(i, pool).Budget
					require.NoError(t, l.RunFeed(ctx, pool, "all", budget.FeedOptions{}, func(_ context.Context, _ pgx.Tx, entries []budget.FeedEntry) error {
						for _, e := range entries {
							consumed[fmt.Sprintf("%s/%d", e.Scope, e.Seq)]++
						}
						return nil
					}))
				}
			}
			spend := func(scope string) {
				in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
					_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1})
					return err
				})
			}
			spend("acme/a")
			consume()
			first := w.lives("acme")
			for i := range 4 {
				spend("acme/a") // it has no number when it leaves
				to := (first + 1 + i%2) % 3
				w.move(r, "acme", to)
				spend("acme/b")
				l := w.client(to, w.pools[to]).Budget
				_, err := l.NumberFeed(ctx, w.pools[to])
				require.NoError(t, err)
				err = r.Move(ctx, cells.Move{Tenant: "acme", To: first, Tables: appTables, LockTimeout: time.Minute})
				require.ErrorIs(t, err, cells.ErrOpen)
				require.ErrorContains(t, err, `consumer all of the feed has not consumed entries of acme/`)
				consume()
				var gap *budget.FeedGapError
				if i == 3 { // a reader that is no consumer is told
					for _, err := range w.client(first, w.pools[first]).Budget.Feed(ctx, w.pools[first], "", budget.FeedOptions{}) {
						require.ErrorAs(t, err, &gap)
					}
					require.NotNil(t, gap)
				}
			}
			require.Len(t, consumed, 9)
			for entry, times := range consumed {
				require.Equal(t, 1, times, entry)
			}
			w.verified()
		})
	}
}
