package cells_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/leases"
)

// Other programs must find the same first cell, in each release. In SQL, for 64 cells:
//
//	select mod(('x' || encode(substr(sha256(convert_to('acme', 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint::numeric + 18446744073709551616, 64)
func TestRouter_FirstCellsStay(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	var clients []*metered.Client
	for i := range 256 {
		c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: fmt.Sprint("cell_", i)}})
		require.NoError(t, err)
		clients = append(clients, c)
	}
	for n, want := range map[int][]int{1: {0, 0, 0, 0}, 16: {0, 12, 7, 10}, 64: {32, 28, 7, 10}, 256: {160, 92, 199, 202}} {
		r, err := cells.New(clients[:n])
		require.NoError(t, err)
		var got []int
		for _, tenant := range []string{"acme", "org/acme", "ünï", "a"} {
			got = append(got, r.First(tenant))
		}
		require.Equal(t, want, got, n)
	}
}

func TestRouter_RefusesArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	for _, clients := range [][]*metered.Client{nil, {nil}, {{}}, {c, c}, make([]*metered.Client, 257)} {
		_, err := cells.New(clients)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	r, err := cells.New([]*metered.Client{c})
	require.NoError(t, err)
	for _, tenant := range []string{"", "/", "a/", "/a", "a//b", "a/b/c/d/e", "\x00", "\xff", strings.Repeat("x", 201)} {
		_, err := r.Client(tenant)
		require.ErrorIs(t, err, budget.ErrArgument, tenant)
		require.ErrorIs(t, r.Run(t.Context(), tenant, nil), budget.ErrArgument)
		require.ErrorIs(t, r.Move(t.Context(), cells.Move{Tenant: tenant}), budget.ErrArgument)
	}
	require.ErrorIs(t, r.Run(t.Context(), "a", nil), budget.ErrArgument)
	for field, m := range map[string]cells.Move{"Move.To": {To: 1}, "Move.LockTimeout": {LockTimeout: 1}, "Move.Tables": {Tables: []cells.Table{{}}}} {
		m.Tenant = "a"
		pgtest.RequireField(t, r.Move(t.Context(), m), field, "")
	}
	for _, none := range []*cells.Router{nil, {}} {
		require.ErrorIs(t, none.SetUp(t.Context()), budget.ErrArgument)
		_, err := none.Recover(t.Context())
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = none.Client("a")
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	bound, err := r.Client("org/acme")
	require.NoError(t, err)
	for _, tenant := range []string{"", "org", "org/acmes", "org/acm"} { // their records would stay behind
		_, err := metered.Do[int](t.Context(), bound, metered.Command{ID: "1", Tenant: tenant}, nil)
		pgtest.RequireField(t, err, "Command.Tenant", "")
	}
	_, err = metered.Open[int](t.Context(), bound, metered.Reservation{ID: "1", Tenant: "org", Lines: []holds.Line{{Scope: "org/acme", Amount: 1}}})
	pgtest.RequireField(t, err, "Reservation.Tenant", "")
}

// A schema that is another cell, or none, is refused before anything is written, and its numbers begin in a range of its own.
func TestSetUp_NumbersTheCells(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	require.NoError(t, w.router().SetUp(t.Context()))
	charge := func(r *cells.Router, tenant string) error {
		return r.Run(t.Context(), tenant, func(ctx context.Context, c *metered.Client) error {
			_, err := metered.Do[int](ctx, c, metered.Command{ID: "1", Tenant: tenant, Charges: []budget.Charge{{Scope: tenant, Amount: 1}}}, nil)
			return err
		})
	}
	swapped := *w
	swapped.schemas = []string{"cell_1", "cell_0"}
	require.ErrorIs(t, charge(swapped.router(), "acme"), cells.ErrNotCell)
	require.ErrorIs(t, swapped.router().SetUp(t.Context()), cells.ErrNotCell)
	fewer := *w
	fewer.pools = w.pools[:1]
	require.ErrorIs(t, charge(fewer.router(), "acme"), cells.ErrNotCell)
	require.ErrorIs(t, fewer.router().SetUp(t.Context()), cells.ErrNotCell)
	require.Zero(t, pgtest.Count(t, w.pools[0], "cell_0.ledger")+pgtest.Count(t, w.pools[0], "cell_1.ledger"))
	r := w.router()
	var tenant string
	for i := range 2 {
		tenant = fmt.Sprint("t", i)
		for n := 0; r.First(tenant) != i; n++ {
			tenant = fmt.Sprint("t", i, n)
		}
		in(t, r, tenant, func(c *metered.Client, tx pgx.Tx) error {
			_, err := c.Holds.Place(t.Context(), tx, holds.Placement{Tenant: tenant, TTL: time.Hour, Lines: []holds.Line{{Scope: tenant, Amount: 1}}})
			return err
		})
		require.Equal(t, int64(i)<<40+1, pgtest.Value[int64](t, w.pools[0], `select no from `+w.schemas[i]+`.holds`))
	}

	_, err := metered.Migrate(t.Context(), w.pools[0], metered.MigrateOptions{Schema: "used"})
	require.NoError(t, err)
	used := *w
	used.schemas = []string{"cell_0", "used"}
	c, err := metered.New(w.pools[0], metered.Config{Config: budget.Config{Schema: "used"}})
	require.NoError(t, err)
	require.ErrorIs(t, charge(used.router(), tenant), cells.ErrNotCell)
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pools[0], func(tx pgx.Tx) error {
		_, err := c.Holds.Place(t.Context(), tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
		return err
	}))
	require.ErrorIs(t, used.router().SetUp(t.Context()), budget.ErrArgument)
}

// A transaction that did not enter the tenant charges nothing in its old cell, at each level, and a snapshot from before a move enters nowhere.
func TestMove_LeavesNoWayBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r, stale := w.router(), w.router()
	in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "acme/a", Amount: 1})
		return err
	})
	old, err := stale.Client("acme")
	require.NoError(t, err)
	pool := w.pools[0]
	for round := range 2 { // in the second round each cell has a row of the tenant
		from := w.lives("acme")
		for _, level := range pgtest.IsolationLevels[1:] {
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			require.Equal(t, 1, pgtest.Value[int](t, tx, `select 1`)) // its snapshot
			w.move(r, "acme", 1-w.lives("acme"))
			for at, schema := range w.schemas {
				_, err = tx.Exec(t.Context(), `savepoint s`)
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `select `+schema+`.enter_tenant('acme', $1, $2, 2, $3, 1000)`, lockkey.OfTenant(schema, "acme"), at, at == r.First("acme"))
				require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), "%d: cell %d %v", round, at, err)
				_, err = tx.Exec(t.Context(), `rollback to s`)
				require.NoError(t, err)
			}
			require.NoError(t, tx.Rollback(t.Context()))
		}
		require.Equal(t, from, w.lives("acme"))
	}
	w.move(r, "acme", 1-r.First("acme"))
	for _, level := range pgtest.IsolationLevels {
		for _, scope := range []string{"acme/a", "acme", "acme/new"} {
			for name, call := range map[string]func(tx pgx.Tx) error{
				"charge": func(tx pgx.Tx) error {
					_, err := old.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 1})
					return err
				},
				"credit": func(tx pgx.Tx) error {
					_, err := old.Budget.Credit(t.Context(), tx, budget.Credit{Scope: scope, Amount: 1})
					return err
				},
				"capture": func(tx pgx.Tx) error {
					_, err := old.Holds.Capture(t.Context(), tx, holds.Capture{Tenant: "acme/a", IDs: []string{"it is there"}, All: true})
					return err
				},
				"expire": func(tx pgx.Tx) error {
					_, _, err := old.Holds.Expire(t.Context(), tx, holds.Expire{Tenant: "acme", ID: "it is there", Deadline: time.Now()})
					return err
				},
				"place": func(tx pgx.Tx) error {
					_, err := old.Holds.Place(t.Context(), tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 1}}})
					return err
				},
			} {
				err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, call)
				require.ErrorIs(t, err, cells.ErrMoved, "%s %s %s", name, scope, level)
				require.Equal(t, "tenant_moved", metered.Code(err))
				require.True(t, metered.Retryable(err))
			}
		}
	}
	// Answers that something is not there are no answers of the old cell.
	_, err = old.Lookup(t.Context(), pool, "acme", "1")
	require.ErrorIs(t, err, cells.ErrMoved)
	_, err = metered.Resume[int](t.Context(), old, metered.Reservation{ID: "1", Tenant: "acme"})
	require.ErrorIs(t, err, cells.ErrMoved)
	w.lives("acme")
}

func TestMove_RefusesWhatIsOpen(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r := w.router()
	far := w.router()
	refused := func(why string) {
		t.Helper()
		err := far.Move(t.Context(), cells.Move{Tenant: "acme", To: 1 - r.First("acme")})
		require.ErrorIs(t, err, cells.ErrOpen)
		require.ErrorContains(t, err, why)
		require.NotContains(t, err.Error(), "; ", "nothing else is open")
		require.Equal(t, r.First("acme"), w.lives("acme"))
	}
	place := func(request holds.Placement) (end func()) {
		t.Helper()
		request.TTL = time.Hour
		var h holds.Hold
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
			h, err = c.Holds.Place(t.Context(), tx, request)
			return err
		})
		return func() {
			in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
				_, err = c.Holds.Release(t.Context(), tx, holds.Release{Tenant: request.Tenant, IDs: []string{h.ID}})
				return err
			})
		}
	}
	end := place(holds.Placement{Tenant: "acme", ID: "a", Lines: []holds.Line{{Scope: "acme", Amount: 1}, {Scope: "shared", Amount: 1}}})
	refused(`hold a of tenant "acme" has units of shared`)
	end()
	end = place(holds.Placement{Tenant: "other", ID: "b", Lines: []holds.Line{{Scope: "acme", Amount: 1}}})
	refused(`hold b of tenant "other" has units of acme`)
	end()
	pgtest.Execute(t, w.pools[0], `delete from `+w.schemas[r.First("acme")]+`.hold_lines where scope = 'acme'`) // it stays, as the other's
	end = place(holds.Placement{Tenant: "acme", ID: "job/7/0123456789abcdef", Lines: []holds.Line{{Scope: "acme", Amount: 1}}})
	refused("is that of a job")
	end()
	for _, away := range []bool{false, true} {
		var carver *leases.Carver
		child := fmt.Sprint("run/", away)
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
			carver, err = leases.NewCarver(c.Budget)
			require.NoError(t, err)
			_, err = carver.Carve(t.Context(), tx, leases.Carving{Child: child, From: budget.Charge{Scope: "acme/x", Amount: 5}, TTL: time.Hour, Away: away})
			return err
		})
		refused("was carved for " + child)
		in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) (err error) {
			if away {
				_, err = carver.SettleAway(t.Context(), tx, child, 2, budget.Note{})
			} else {
				_, err = carver.End(t.Context(), tx, child, budget.Note{})
			}
			return err
		})
	}
	pgtest.Execute(t, w.pools[0], fmt.Sprintf(`insert into %s.parked_jobs (job_id, turn, amount, class, parked_at, priority, scope, fair, tenant, job, hold, charges)
		values (9, 1, 1, 1, now(), 1, 'acme/x', '', 'acme', '{}', '', '{}')`, w.schemas[r.First("acme")]))
	refused("job 9 waits for acme/x")
	pgtest.Execute(t, w.pools[0], fmt.Sprintf(`delete from %s.parked_jobs`, w.schemas[r.First("acme")]))

	// A hold without a tenant is that of its scopes.
	place(holds.Placement{Lines: []holds.Line{{Scope: "acme", Amount: 1}}})
	w.move(r, "acme", 1-r.First("acme"))
	require.Equal(t, 1-r.First("acme"), w.lives("acme"))
	w.verified()
}

// Rows that cannot arrive change nothing in one database. Between databases the move is taken back.
func TestMove_ConflictsAreTakenBack(t *testing.T) {
	t.Parallel()
	for name, pools := range map[string][]*pgxpool.Pool{"one": {database(t)}, "two": {database(t), database(t)}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 2, pools...)
			r := w.router()
			from := r.First("acme")
			_, err := do(t.Context(), r, command("first"), func(context.Context, *metered.Tx) (int, error) { return 1, nil })
			require.NoError(t, err)
			pgtest.Execute(t, w.pools[from], `insert into `+w.schemas[from]+`.uploads (tenant, name) values ('acme', 'a')`)
			pgtest.Execute(t, w.pools[1-from], `insert into `+w.schemas[1-from]+`.uploads (tenant, name) values ('other', 'a')`)
			m := cells.Move{Tenant: "acme", To: 1 - from, Tables: appTables}
			require.ErrorIs(t, r.Move(t.Context(), m), cells.ErrConflict)
			if name == "two" {
				within, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				_, err = do(within, w.router(), command("second"), func(context.Context, *metered.Tx) (int, error) { return 1, nil })
				require.Error(t, err)
			}
			w.move(w.router(), "acme", from)
			require.Equal(t, from, w.lives("acme"))
			_, err = do(t.Context(), r, command("second"), func(context.Context, *metered.Tx) (int, error) { return 1, nil })
			require.NoError(t, err)
			pgtest.Execute(t, w.pools[1-from], `alter table `+w.schemas[1-from]+`.pages add more int`)
			require.ErrorIs(t, r.Move(t.Context(), m), cells.ErrConflict)
			pgtest.Execute(t, w.pools[1-from], `alter table `+w.schemas[1-from]+`.pages drop more`)
			pgtest.Execute(t, w.pools[1-from], `delete from `+w.schemas[1-from]+`.uploads`)
			w.move(r, "acme", 1-from)
			require.Equal(t, 1-from, w.lives("acme"))
			out, err := do(t.Context(), w.router(), command("first"), func(context.Context, *metered.Tx) (int, error) { panic("it ran") })
			require.NoError(t, err)
			require.True(t, out.Replayed)
			w.verified()
		})
	}
}
