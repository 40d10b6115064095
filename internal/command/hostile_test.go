package command_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// hostileCalls is how many calls the test below makes: METERED_HOSTILE_CALLS, or few.
func hostileCalls(t *testing.T) int {
	text := os.Getenv("METERED_HOSTILE_CALLS")
	if text == "" {
		return pgtest.Sizes(500, 1_200, 12_000)
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// A role with the documented grants calls every function it may, with whatever arguments:
// nulls, negative and huge numbers, arrays of wrong lengths and bounds, other tenants' ids. It
// may charge, credit, refund and end holds, as any application. It breaks no invariant. The short form finds a refund of more than is left of its charge.
func TestGrants_NoCallBreaksAnInvariant(t *testing.T) {
	t.Parallel()
	for _, grant := range []struct {
		name   string
		render func(schema, role string) (string, error)
		share  int // of the calls
	}{{"application", metered.GrantSQL, 5}, {"maintenance", metered.GrantMaintenanceSQL, 1}} {
		t.Run(grant.name, func(t *testing.T) {
			t.Parallel()
			h := newHostile(t)
			role := pgtest.AsRole(t, h.owner, grant.render, "")
			functions := h.functions(role)
			require.Greater(t, len(functions), 5)
			calls := hostileCalls(t) * grant.share / 6
			refused, by, tried := map[string]int{}, map[string]int{}, map[string]int{}
			for n := range calls {
				if n%(calls/4+1) == calls/4 {
					h.clock.Advance(20 * time.Minute) // what is held falls due
				}
				if n%50 == 0 {
					h.refill(n)
				}
				f := functions[h.rand.IntN(len(functions))]
				sql := h.call(f)
				tried[f.name]++
				err := h.exec(role, sql)
				var answer *pgconn.PgError
				switch {
				case err == nil:
					by[f.name]++
				case errors.As(err, &answer):
					require.NotContains(t, []string{"XX000", "XX001", "57P01", "57014", "42601"}, answer.Code, "%s\n%v", sql, err)
					refused[answer.Code]++
					if os.Getenv("HOSTILE_SHOW") == answer.Code {
						t.Logf("%v\n%s", err, sql)
					}
				default:
					require.NoError(t, err, sql)
				}
			}
			t.Logf("%d calls, refused: %v, done: %v", calls, refused, by)
			for name, n := range tried {
				if n < 150 {
					continue // of few calls with drawn arguments none may be valid
				}
				if !slices.Contains([]string{"metered.block_commit", "metered.begin_command", "metered.complete_command", "metered.finish_command"}, name) {
					require.Positive(t, by[name], "no call of %s got through", name) // these are for a command's transaction
				}
			}
			h.check(grant.name == "maintenance", calls >= 10_000)
		})
	}
}

// roleSettings are those that a role may choose for itself.
var roleSettings = []string{
	"search_path = evil, metered, pg_catalog", "search_path = ''", "time zone 'Asia/Kathmandu'", "jit = on; set local jit_above_cost = 0", "row_security = off",
	"statement_timeout = '1 min'", "enable_seqscan = off", "datestyle = 'SQL, DMY'", "extra_float_digits = -15", "plan_cache_mode = force_generic_plan",
}

// evilSQL makes tables and functions of the library's names, for a search_path that has them first.
const evilSQL = `create schema evil; grant usage on schema evil to public;
	do $$ declare t text; begin
		for t in select relname from pg_class where relnamespace = 'metered'::regnamespace and relkind in ('r', 'v') loop
			execute format('create table evil.%I (like metered.%I); grant all on evil.%I to public', t, t, t);
		end loop;
	end $$;
	create function evil.clock() returns timestamptz language sql as $$ select timestamptz '1970-01-01Z' $$;
	create function evil._lock_keys(bigint[], int) returns boolean language sql as 'select false'`

// exec makes a call: by itself, or in a transaction with a setting, which is committed, or prepared and then committed.
func (h *hostile) exec(role *pgxpool.Pool, sql string) error {
	ctx := h.Context()
	if h.rand.IntN(3) == 0 {
		_, err := role.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}
	conn, err := role.Acquire(ctx)
	require.NoError(h, err)
	defer conn.Release()
	run := func(sql string) {
		if err == nil {
			_, err = conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		}
	}
	run("begin isolation level " + string(isolationLevels[h.rand.IntN(len(isolationLevels))]))
	run("set local " + roleSettings[h.rand.IntN(len(roleSettings))])
	run(sql)
	if h.rand.IntN(10) == 0 {
		run("prepare transaction 'hostile'")
		run("commit prepared 'hostile'")
	}
	if err == nil && conn.Conn().PgConn().TxStatus() == 'T' {
		run("commit")
		return err
	}
	_, end := conn.Exec(ctx, "rollback", pgx.QueryExecModeSimpleProtocol)
	require.NoError(h, end)
	return err
}

type hostile struct {
	*testing.T
	owner *pgxpool.Pool
	c     *metered.Client
	clock *pgtest.Clock
	rand  *rand.Rand

	entries map[string]string // the ledger as it was, by scope and seq
	recent  []string          // ids of holds that were placed last, without a tenant
	leased  [][2]int64        // leases that were opened last, with their locks
	types   map[uint32]hostileType
}

func newHostile(t *testing.T) *hostile {
	ctx := t.Context()
	owner, c := setUp(t, metered.Config{})
	h := &hostile{T: t, owner: owner, c: c, rand: pgtest.Random(t), types: map[uint32]hostileType{}}
	h.clock = pgtest.SetClock(t, owner, pgtest.Tomorrow(12))
	_, err := owner.Exec(ctx, evilSQL, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	_, err = owner.Exec(ctx, `select metered.grant_lot('w', null, row(1000, null, g * interval '10 min', '', 0, null, null, 5, '1 h', null)::metered.new_lot, false, 1000, null)
		from generate_series(1, 20) g`)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, owner, func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(ctx, tx, charge("full", 100, 100))
		for i := range 40 {
			_, again := c.Budget.Charge(ctx, tx, charge("a", int64(1+i), 1_000_000))
			err = errors.Join(err, again)
		}
		_, credit := c.Budget.Credit(ctx, tx, budget.Credit{Scope: "credit", Amount: 100})
		_, made := c.Budget.Create(ctx, tx, "full", "a", "seats", "gone")
		_, gone := c.Budget.Retire(ctx, tx, "gone")
		return errors.Join(err, credit, made, gone)
	}))
	for i := range 12 {
		id, tenant := fmt.Sprintf("h%d", i), []string{"", "acme"}[i%2]
		_, err := pgtest.InTx(ctx, owner, func(tx pgx.Tx) (holds.Hold, error) {
			return c.Holds.Place(ctx, tx, holds.Placement{ID: id, Tenant: tenant, Holder: []string{"", "ann"}[i/2%2], TTL: 10 * time.Minute,
				Lines: []holds.Line{{Scope: "seats", Amount: 3}, {Scope: "a", Amount: 2}}})
		})
		require.NoError(t, err)
		if i >= 8 {
			_, err = pgtest.InTx(ctx, owner, func(tx pgx.Tx) ([]holds.Hold, error) {
				return c.Holds.Capture(ctx, tx, holds.Capture{Tenant: tenant, IDs: []string{id}, All: true})
			})
			require.NoError(t, err)
		}
	}
	_, err = pgtest.InTx(ctx, owner, func(tx pgx.Tx) (tokens.Minted, error) {
		return c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", Uses: 3, TTL: time.Hour})
	})
	require.NoError(t, err)
	_, err = metered.Do[int](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{charge("a", 1, 1_000_000)}}, nil)
	require.NoError(t, err)
	h.entries = h.ledger()
	return h
}

// refill places holds for calls to end, since those that there were have ended: past what is due, by steps.
func (h *hostile) refill(n int) {
	h.recent = nil
	for _, scope := range []string{"a", "seats"} {
		for more := true; more; {
			require.NoError(h, h.owner.QueryRow(h.Context(), `select metered.catch_up($1, 1000)`, scope).Scan(&more))
		}
	}
	var lease [2]int64
	require.NoError(h, h.owner.QueryRow(h.Context(), `select no, fence from metered.open_lease(
		row('a', null, 40, 0, '{}', null, null, null, null)::metered.new_charge, row('rows', 'me', 1, 1, '10 min', null)::metered.lease_terms, '1 min', 1000)`).Scan(&lease[0], &lease[1]))
	h.leased = append(h.leased, lease)
	for i := range 4 {
		id := fmt.Sprintf("n%d %d", n, i)
		_, err := pgtest.InTx(h.Context(), h.owner, func(tx pgx.Tx) (holds.Hold, error) {
			return h.c.Holds.Place(h.Context(), tx, holds.Placement{ID: id, TTL: 10 * time.Minute,
				Lines: []holds.Line{{Scope: "seats", Amount: 3}, {Scope: "a", Amount: 2}}})
		})
		require.NoError(h, err)
		h.recent = append(h.recent, id)
	}
}

// ledger is every entry, whole.
func (h *hostile) ledger() map[string]string {
	rows, err := h.owner.Query(h.Context(), `select scope || ' ' || seq, to_jsonb(l)::text from metered.ledger l`)
	require.NoError(h, err)
	entries := map[string]string{}
	var key, entry string
	_, err = pgx.ForEachRow(rows, []any{&key, &entry}, func() error { entries[key] = entry; return nil })
	require.NoError(h, err)
	return entries
}

// check looks at all invariants, when everything that is due has been swept. Of many calls some have done each thing.
func (h *hostile) check(purged, many bool) {
	h.Helper()
	ctx := h.Context()
	report, err := h.c.Budget.Verify(ctx, h.owner, budget.VerifyOptions{})
	require.NoError(h, err)
	require.Empty(h, report.Differences)
	if !purged {
		now := h.ledger()
		for key, entry := range h.entries {
			require.Equal(h, entry, now[key], "an entry was changed")
		}
	}
	if !purged {
		for _, kind := range []string{"t", "u", "f", "g", "e", "v", "o"} {
			require.True(h, !many || count(h.T, h.owner, "metered.lot_moves where kind = '"+kind+"'") > 0, kind)
		}
		require.True(h, !many || count(h.T, h.owner, "metered.lease_spends") > 0)
		require.True(h, !many || count(h.T, h.owner, "metered.leases where spent > 0") > 0)
		require.Zero(h, count(h.T, h.owner, `(select from metered.leases l where mode = 's' and settled_at is not null
			and spent <> coalesce((select sum(s.amount) from metered.lease_spends s where s.lease = l.no), 0)) l`), "what leases captured")
	}
	for what, sql := range map[string]string{
		"leases of more than they held":     `select count(*) from metered.leases l where mode in ('s', 'm') and (spent > granted or spent < 0 or granted < 1 or (select sum(s.amount) from metered.lease_spends s where s.lease = l.no) > granted)`,
		"spends of a range twice":           `select count(*) from metered.lease_spends a join metered.lease_spends b on b.lease = a.lease and b.at_offset > a.at_offset and b.at_offset < a.at_offset + a.amount`,
		"spends out of their lease":         `select count(*) from metered.lease_spends s left join metered.leases l on l.no = s.lease where l.no is null or s.at_offset < 0 or s.amount < 1 or s.at_offset + s.amount > l.granted or s.at >= l.ends_at`,
		"sums that are negative":            `select count(*) from metered.ledger where least(spent, refunded, credited, held) < 0`,
		"lines at odds with themselves":     `select count(*) from metered.hold_lines where open < 0 or captured < 0 or refunded < 0 or open > amount or refunded > captured`,
		"minimums that no line can capture": `select count(*) from metered.hold_lines where at_least < 0 or at_least > amount`,
		"lots at odds with themselves":      `select count(*) from metered.lots where least(rest, drawn, held, lapsed, revoked, rolled, untold) < 0 or untold > lapsed or expires_at <= granted_at`,
		"lots of no wallet":                 `select count(*) from metered.lots l where (select e.lots_end from metered.ledger e where e.scope = l.scope order by e.seq desc limit 1) is null`,
		"open lines of holds that ended":    `select count(*) from metered.hold_lines l join metered.holds h on h.no = l.hold where l.open <> 0 and (h.state in ('c', 'r') or not h.pending)`,
		"holds without their line's key":    `select count(*) from metered.hold_lines l join metered.holds h on h.no = l.hold where l.key <> metered._scope_key(l.scope) or l.key <> all (h.keys)`,
		"deadlines after the ceiling":       `select count(*) from metered.holds where deadline > ceiling or due < deadline or deadline <= placed_at`,
		"holds that ended twice":            `select count(*) from (select hold from metered.hold_events where kind in ('c', 'r', 'x') group by hold having count(*) > 1) e`,
		"histories with gaps":               `select count(*) from metered.holds h where version <> (select count(*) from metered.hold_events e where e.hold = h.no) or version <> (select max(version) from metered.hold_events e where e.hold = h.no)`,
		"claims that are there twice":       `select count(*) from (select claim from metered.holds where claim is not null and (state = 'h' or state = 'c' and not returned) group by claim having count(*) > 1) c`,
		"resources out of bounds":           `select count(*) from metered.resources where octet_length(scope) not between 1 and 255 or retired_at < created_at or created_at > metered.clock()`,
		"tokens used too often":             `select count(*) from metered.tokens where used > uses or expires_at > minted_at + interval '400 days'`,
		"horizons in the future":            `select count(*) from (select at from metered.holds_horizon union all select at from metered.operations_horizon) z where at > metered.clock()`,
		"events that were counted twice":    `select count(*) from (select 1 from metered.ledger l join metered.operations o on o.tenant = l.operation_tenant and o.id = l.operation where o.result = 'null' group by o.tenant, o.id having count(*) > 1) e`,
		"ids of events beyond the bounds":   `select count(*) from metered.operations where octet_length(id) > 255 or octet_length(tenant) > 255 or octet_length(fingerprint) <> 33`,
		"notes and names beyond the bounds": `select count(*) from metered.ledger where octet_length(scope) > 255 or octet_length(note::text) > 16384`,
	} {
		require.Zero(h, count(h.T, h.owner, "("+sql+") x(n) where n > 0"), what)
	}
	for _, table := range []string{"ledger", "holds", "tokens", "operations", "lots", "lot_rows"} {
		require.Zero(h, count(h.T, h.owner, "evil."+table), "rows went to a table of the same name")
	}
	list, err := h.c.Holds.List(ctx, h.owner, holds.Filter{})
	require.NoError(h, err)
	for _, hold := range list.Holds {
		history, err := h.c.Holds.History(ctx, h.owner, hold.Tenant, hold.ID, "")
		require.NoError(h, err)
		if history[0].Kind != holds.EventPlaced {
			continue
		}
		_, err = holds.Rebuild(holds.Hold{}, history)
		require.NoError(h, err)
	}
	require.Zero(h, count(h.T, h.owner, "metered.resources where scope = 'credit'"), "no retirement creates, and no such scope was")
	// Whatever is held falls due, and leases end, and then everybody gets through.
	h.clock.Advance(20 * 365 * 24 * time.Hour)
	for sweeps := 0; ; sweeps++ {
		swept, err := h.c.Holds.Sweep(ctx, h.owner, holds.SweepOptions{})
		require.NoError(h, err)
		if swept.Expired == 0 {
			break
		}
		require.Less(h, sweeps, 50)
	}
	for range 5 { // a child's child first
		_, err = h.owner.Exec(ctx, `select metered.settle_lease(no, 'anybody', null, 1000, null, null), metered.end_child(child, 'anybody', 1000), metered.settle_away(child, null, 'anybody', 1000)
			from metered.leases where settled_at is null order by no`)
		require.NoError(h, err)
	}
	require.Zero(h, count(h.T, h.owner, "metered.hold_lines where open <> 0"))
	require.Zero(h, count(h.T, h.owner, "metered.lot_holds"))
	require.Zero(h, count(h.T, h.owner, "(select distinct on (scope) held from metered.ledger order by scope, seq desc) l where held <> 0"))
	for _, scope := range []string{"full", "seats", "a", "credit"} {
		_, err := pgtest.InTx(ctx, h.owner, func(tx pgx.Tx) (budget.Receipt, error) {
			return h.c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{{Max: bounds.MaxLimit, Window: time.Second}}})
		})
		require.NoError(h, err, scope)
	}
}

// hostileFunction is a function that the role may execute.
type hostileFunction struct {
	name  string
	args  []uint32
	names []string
}

func (h *hostile) functions(role *pgxpool.Pool) []hostileFunction {
	rows, err := role.Query(h.Context(), `select p.oid::regproc::text, p.proargtypes::oid[], coalesce(p.proargnames, '{}') from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and has_function_privilege(p.oid, 'execute') order by p.oid`)
	require.NoError(h, err)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f hostileFunction, err error) {
		err = row.Scan(&f.name, &f.args, &f.names)
		return f, err
	})
	require.NoError(h, err)
	return all
}

func (h *hostile) call(f hostileFunction) string {
	args := make([]string, len(f.args))
	for i, oid := range f.args {
		args[i] = h.value(oid, f.names[i])
	}
	// A purge and a repair want the key of their scope.
	if scope, key := slices.Index(f.names, "of_scope"), slices.Index(f.names, "key"); scope >= 0 && key >= 0 && h.rand.IntN(4) > 0 {
		name := []string{"a", "seats", "full", "credit", "w"}[h.rand.IntN(5)]
		args[scope], args[key] = "'"+name+"'", strconv.FormatInt(h.c.Budget.LockKey(name), 10)
	}
	// So does a spend want its lease's.
	if charges := slices.Index(f.names, "charges"); f.name == "metered.charge_leased" && len(h.leased) > 0 && h.rand.IntN(4) > 0 {
		rows := make([]string, 1+h.rand.IntN(3))
		for i := range rows {
			of := h.leased[max(0, len(h.leased)-1-h.rand.IntN(3))]
			rows[i] = fmt.Sprintf("row('a', %d, %s, 0, '{}', null, null, %d, %d)", of[1], h.value(20, "amount"), of[0], h.rand.IntN(45)-2)
		}
		args[charges] = "array[" + strings.Join(rows, ", ") + "]::metered.new_charge[]"
	}
	// A carving wants its scope's, and a child; it may be of a child.
	if f.name == "metered.carve" && h.rand.IntN(4) > 0 {
		name := []string{"a", "w", "k1", "k2"}[h.rand.IntN(4)]
		args[slices.Index(f.names, "charge")] = fmt.Sprintf("row('%s', %d, %s, 0, '{}', null, null, null, null)::metered.new_charge", name, h.c.Budget.LockKey(name), h.value(20, "amount"))
		args[slices.Index(f.names, "terms")] = fmt.Sprintf("row(%s, 'me', 1, 1, '10 min', 'k%d')::metered.lease_terms", []string{"'carved'", "'away'"}[h.rand.IntN(2)], h.rand.IntN(5))
	}
	// The id of a session's hold has that of its operation in it.
	if f.name == "metered.open_session" && h.rand.IntN(4) > 0 {
		args[slices.Index(f.names, "hold")] = fmt.Sprintf(`row('', repeat('%d', 32) || gen_random_uuid(), false, null, '', null, decode(repeat('01', 33), 'hex'), null, %s, %s, '1 h', null, null)::metered.new_hold`,
			h.rand.IntN(10), h.value(1186, "ttl"), h.value(1186, "grace"))
		args[slices.Index(f.names, "charges")] = `array[row('seats', null, 3, 3, '{}', null, null, null, null), row('w', null, 2, 1, '{}', null, null, null, null)]::metered.new_charge[]`
	}
	if no := slices.Index(f.names, "of_no"); no >= 0 && len(h.leased) > 0 && h.rand.IntN(4) > 0 {
		args[no] = strconv.FormatInt(h.leased[max(0, len(h.leased)-1-h.rand.IntN(3))][0], 10)
	}
	return "select " + f.name + "(" + strings.Join(args, ", ") + ")"
}
