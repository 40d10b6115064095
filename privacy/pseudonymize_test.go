package privacy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/privacy"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

const alias = "gone/7f3a"

func register(t *testing.T, config privacy.Config) *privacy.Register {
	t.Helper()
	if config.LockTimeout == 0 {
		config.LockTimeout = time.Minute
	}
	r, err := privacy.New(config)
	require.NoError(t, err)
	return r
}

func pseudonymize(t *testing.T, pool *pgxpool.Pool, r *privacy.Register) (report privacy.Report) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		report, err = r.Pseudonymize(t.Context(), tx, subject, alias)
		return err
	}))
	return report
}

func charge(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string, amount int64) budget.Posted {
	t.Helper()
	var receipt budget.Receipt
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		receipt, err = c.Budget.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: amount,
			Limits: []budget.Limit{budget.Lifetime(1000)}, Note: budget.Note{Actor: subject}})
		return err
	}))
	return receipt.Entries[0]
}

func TestPseudonymize_BalancesChainsAndReplaysGoOn(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	in := func(do func(tx pgx.Tx) error) { t.Helper(); require.NoError(t, pgx.BeginFunc(ctx, pool, do)) }
	first := charge(t, pool, c, subject, 30)
	charge(t, pool, c, subject+"/2026-11", 7)
	charge(t, pool, c, "org/acme", 5)
	charge(t, pool, c, "user/anna", 11)
	command := metered.Command{Tenant: subject, ID: "op-1", Charges: []budget.Charge{{Scope: subject, Amount: 3}}}
	_, err := metered.Do(ctx, c, command, func(context.Context, *metered.Tx) (string, error) { return "paid by " + subject, nil })
	require.NoError(t, err)
	ofAcme := metered.Command{Tenant: "org/acme", ID: "op-2", Charges: []budget.Charge{{Scope: subject, Amount: 2}}}
	_, err = metered.Do[any](ctx, c, ofAcme, nil)
	require.NoError(t, err)
	book, err := holds.New(c.Budget, holds.Config{})
	require.NoError(t, err)
	purse, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	var token tokens.Minted
	in(func(tx pgx.Tx) error {
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: subject, Seq: first.Seq, Amount: 10})
		require.NoError(t, err)
		_, err = book.Place(ctx, tx, holds.Placement{ID: "h1", Tenant: subject, Holder: subject, TTL: time.Hour,
			Lines: []holds.Line{{Scope: subject, Amount: 20, Limits: []budget.Limit{budget.Lifetime(1000)}}, {Scope: "room", Amount: 1}}})
		require.NoError(t, err)
		_, err = purse.Grant(ctx, tx, wallet.Grant{Wallet: subject + "/credit", Amount: 100, Category: "paid", Reference: "order-1"})
		require.NoError(t, err)
		_, err = c.Budget.Charge(ctx, tx, purse.Charge(subject+"/credit", 40))
		require.NoError(t, err)
		token, err = c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "upload", Subject: subject, TTL: time.Hour})
		return err
	})
	usage := func(scope string) budget.Usage {
		t.Helper()
		all, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: scope})
		require.NoError(t, err)
		return all[0]
	}
	before := usage(subject)
	require.EqualValues(t, 20, before.Held)

	r := register(t, privacy.Config{})
	report := pseudonymize(t, pool, r)
	require.True(t, report.Done, "%+v", report)
	require.Equal(t, 3, report.Scopes)
	require.Empty(t, found(t, pool, subject+"/"))
	pgtest.RequireVerified(t, pool, c.Budget)

	require.True(t, pgtest.Value[bool](t, pool, `select bool_and(l.key = metered._scope_key(l.scope) and l.key = any (h.keys)) and bool_and(cardinality(h.keys) = 2)
		from metered.hold_lines l join metered.holds h on h.no = l.hold`), "the keys of locks are those of the names")

	after := usage(alias)
	require.Equal(t, before.Used, after.Used)
	require.Equal(t, before.Held, after.Held)
	require.EqualValues(t, 11, usage("user/anna").Used, "another person")
	balance, err := purse.Balance(ctx, pool, alias+"/credit")
	require.NoError(t, err)
	require.EqualValues(t, 60, balance.Units)

	command.Tenant = alias
	again, err := metered.Do(ctx, c, command, func(context.Context, *metered.Tx) (string, error) {
		t.Error("the function ran")
		return "", nil
	})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, "paid by "+alias, again.Result)
	require.Equal(t, alias, again.Receipt.Entries[0].Scope)
	require.Equal(t, first.Seq+1, again.Receipt.Entries[0].Seq)

	late, err := metered.Do[any](ctx, c, ofAcme, nil) // sent again as it was
	require.NoError(t, err)
	require.True(t, late.Replayed)
	require.Equal(t, alias, late.Receipt.Entries[0].Scope)
	ofAcme.Charges[0].Scope = alias
	_, err = metered.Do[any](ctx, c, ofAcme, nil)
	require.ErrorIs(t, err, budget.ErrConflict, "another command has the id")

	in(func(tx pgx.Tx) error {
		_, err := book.Capture(ctx, tx, holds.Capture{Tenant: alias, IDs: []string{"h1"}, Holder: alias, All: true})
		return err
	})
	in(func(tx pgx.Tx) error {
		_, err := c.Tokens.Consume(ctx, tx, "upload", subject, token.Token.Reveal())
		require.ErrorIs(t, err, tokens.ErrInvalid)
		_, err = c.Tokens.Consume(ctx, tx, "upload", alias, token.Token.Reveal())
		return err
	})
	require.Equal(t, first.Seq+6, charge(t, pool, c, alias, 1).Seq, "the chain goes on")
	require.EqualValues(t, 1, charge(t, pool, c, subject, 1).Seq, "the old name begins a new scope")
	pgtest.RequireVerified(t, pool, c.Budget)
}

func TestPseudonymize_ManyRowsAreDoneInSteps(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	for month := range 4 {
		for range 10 {
			charge(t, pool, c, fmt.Sprintf("%s/2026-%02d", subject, month+1), 2)
			charge(t, pool, c, "org/acme", 1)
		}
	}
	r := register(t, privacy.Config{MaxRows: 15})
	var rows int64
	for calls := 1; ; calls++ {
		report := pseudonymize(t, pool, r)
		require.LessOrEqual(t, report.Rows, int64(15))
		require.Positive(t, report.Rows)
		rows += report.Rows
		pgtest.RequireVerified(t, pool, c.Budget)
		if report.Done {
			require.GreaterOrEqual(t, calls, 6)
			break
		}
		require.Less(t, calls, 20)
	}
	require.EqualValues(t, 120, rows, "40 entries get another scope, 80 another actor")
	require.Empty(t, found(t, pool, subject))
	require.Zero(t, pseudonymize(t, pool, r).Rows)
}

func TestPseudonymize_WaitsForOpenLeases(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	slices, err := leases.New(pool, c.Budget, leases.Config{Rules: []leases.Rule{{Prefix: subject, Idle: time.Hour, TTL: time.Hour}}})
	require.NoError(t, err)
	spent := int64(0)
	spend := func(scope string) {
		spent += 5
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := slices.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 5, Limits: []budget.Limit{budget.Lifetime(1000)}})
			return err
		}))
	}
	for pgtest.Count(t, pool, "metered.leases") == 0 { // the first ones are charges, and refused at last
		spend(subject)
	}
	charge(t, pool, c, subject+"/other", 1)
	r := register(t, privacy.Config{})
	report := pseudonymize(t, pool, r)
	require.False(t, report.Done)
	require.Equal(t, []string{"lease 1 of user/ann is open"}, report.Open)
	require.Equal(t, 1, report.Scopes)
	spend(subject)
	require.NoError(t, slices.Close(t.Context()))
	report = pseudonymize(t, pool, r)
	require.True(t, report.Done, "%+v", report)
	pgtest.RequireVerified(t, pool, c.Budget)
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: alias})
	require.NoError(t, err)
	require.Equal(t, spent, usage[0].Used)
}

// A row is rewritten as it is once the transaction that has it has ended, with each kind of column.
func TestPseudonymize_WaitsForARowThatChanges(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, "create table public.notes (id int primary key, names text[], body text)")
	pgtest.Execute(t, pool, "insert into public.notes values (1, array['user/ann', 'org/acme'], 'by user/ann')")
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "update public.notes set body = 'for user/ann'")
	require.NoError(t, err)
	reports, r := make(chan privacy.Report, 1), register(t, privacy.Config{Tables: []string{"public.notes"}})
	go func() { reports <- pseudonymize(t, pool, r) }()
	pgtest.WaitFor(t, "the row's lock", func() bool {
		return pgtest.Value[bool](t, pool, "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')")
	})
	require.NoError(t, tx.Commit(t.Context()))
	report := <-reports
	require.True(t, report.Done)
	require.EqualValues(t, 1, report.Rows)
	require.Equal(t, "{gone/1,org/acme} for gone/1", strings.ReplaceAll(pgtest.Value[string](t, pool, "select names::text || ' ' || body from public.notes"), alias, "gone/1"))
}

func TestPseudonymize_AnAliasOfAnotherIsRefused(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	r := register(t, privacy.Config{})
	do := func(id, tenant string) {
		_, err := metered.Do[any](t.Context(), c, metered.Command{Tenant: tenant, ID: id}, nil)
		require.NoError(t, err)
	}
	refused := func() {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := r.Pseudonymize(t.Context(), tx, subject, alias)
			require.ErrorIs(t, err, privacy.ErrAliasTaken)
			require.Equal(t, "alias_taken", metered.Code(err))
			require.Equal(t, 1, pgtest.Value[int](t, tx, "select 1"), "the transaction goes on")
			return nil
		}))
	}
	do("op", alias)
	do("op", subject)
	refused()
	_, err := pool.Exec(t.Context(), "delete from metered.operations where tenant = $1", alias)
	require.NoError(t, err)
	charge(t, pool, c, subject, 1)
	charge(t, pool, c, alias, 1)
	refused()
	_, err = pool.Exec(t.Context(), "update metered.ledger set seq = 17 where scope = $1", alias) // as after a purge: no two rows collide
	require.NoError(t, err)
	refused()
	require.NotEmpty(t, found(t, pool, subject))
}

func TestPseudonymize_BesideChargesLosesNone(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	charge(t, pool, c, subject, 1)
	r := register(t, privacy.Config{})
	const writers, each = 4, 40
	var begun atomic.Int64
	pgtest.AtOnce(writers+1, func(i int) {
		if i == writers {
			for begun.Load() < writers*each/4 {
				time.Sleep(time.Millisecond)
			}
			require.NoError(t, pgtest.Retried(t.Context(), pool, pgx.ReadCommitted, func(tx pgx.Tx) error {
				_, err := r.Pseudonymize(t.Context(), tx, subject, alias)
				return err
			}))
			return
		}
		for range each {
			begun.Add(1)
			charge(t, pool, c, subject, 1)
		}
	})
	pgtest.RequireVerified(t, pool, c.Budget)
	require.EqualValues(t, writers*each+1, pgtest.Value[int64](t, pool, "select sum(spent) from (select max(spent) as spent from metered.ledger group by scope) s"))
	require.Positive(t, pgtest.Value[int64](t, pool, "select count(*) from metered.ledger where scope = $1", alias))
}

func TestPseudonymize_WaitsForTheLocksOfBothNames(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	charge(t, pool, c, subject, 1)
	r := register(t, privacy.Config{LockTimeout: 20 * time.Millisecond})
	for _, lock := range []string{"select pg_advisory_xact_lock(metered._scope_key('user/ann'))", "select pg_advisory_xact_lock(metered._scope_key('gone/7f3a'))",
		"select pg_advisory_xact_lock_shared(metered._tally_key('user/ann'))", "select from metered.feed_state for update",
		"lock table metered.notary_heads in share row exclusive mode"} {
		holder, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = holder.Rollback(context.Background()) }()
		_, err = holder.Exec(t.Context(), lock)
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := r.Pseudonymize(t.Context(), tx, subject, alias)
			require.ErrorIs(t, err, budget.ErrBusy, lock)
			require.Equal(t, 1, pgtest.Value[int](t, tx, "select 1"))
			return nil
		}))
		require.NoError(t, holder.Rollback(t.Context()))
	}
	require.True(t, pseudonymize(t, pool, r).Done)
}

// A round of the feed goes by names of scopes. One whose name changes meanwhile is not passed over, and nor are others.
func TestPseudonymize_BesideARoundOfTheFeed(t *testing.T) {
	t.Parallel()
	for _, other := range []string{"a/1", "zz/1"} {
		pool, c := pgtest.SetUp(t, metered.Config{})
		for _, scope := range []string{"b", "m", subject, "z"} {
			charge(t, pool, c, scope, 1)
		}
		number := func() (done bool) {
			return pgtest.Value[bool](t, pool, "select done from metered.number_feed(2)")
		}
		require.False(t, number(), "it has come to the person")
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := register(t, privacy.Config{}).Pseudonymize(t.Context(), tx, subject, other)
			return err
		}))
		charge(t, pool, c, other, 1)
		charge(t, pool, c, "b", 1)
		for !number() {
		}
		require.Equal(t, pgtest.Count(t, pool, "metered.ledger"), pgtest.Value[int](t, pool, "select sum(entries)::int from metered.feed"), other)
		require.Zero(t, pgtest.Value[int](t, pool, `select count(*)::int from metered.ledger l where 1 <> (
			select count(*) from metered.feed f where f.scope = l.scope and l.seq between f.seq - f.entries + 1 and f.seq)`))
	}
}

func TestPseudonymize_IsTheOwners(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	charge(t, pool, c, subject, 1)
	r := register(t, privacy.Config{})
	role := pgtest.AsRole(t, pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL, metered.GrantMaintenanceSQL, metered.GrantReportingSQL), "")
	err := pgx.BeginFunc(t.Context(), role, func(tx pgx.Tx) error {
		_, err := r.Pseudonymize(t.Context(), tx, subject, alias)
		return err
	})
	require.ErrorIs(t, err, budget.ErrNotGranted)
	for _, err = range r.Export(t.Context(), role, subject) {
		if err != nil {
			break
		}
	}
	require.ErrorIs(t, err, budget.ErrNotGranted)
	require.NotEmpty(t, found(t, pool, subject))
}

func TestPseudonymize_RefusesAnOldSnapshotAndWrongArguments(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.SetUp(t, metered.Config{})
	r := register(t, privacy.Config{})
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		require.NoError(t, pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			_, err := r.Pseudonymize(t.Context(), tx, subject, alias)
			pgtest.RequireField(t, err, "tx", string(level))
			require.NotContains(t, pgtest.Value[string](t, tx, "select pg_catalog.current_setting('search_path')"), "pg_temp")
			return nil
		}))
	}
	tx := pgx.Tx(nil)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(open pgx.Tx) error {
		tx = open
		for _, wrong := range [][3]string{{"", alias, "subject"}, {"a\x00", alias, "subject"}, {subject, "", "alias"}, {subject, "née", "alias"},
			{subject, "a b", "alias"}, {subject, "old/user/ann", "alias"}} {
			_, err := r.Pseudonymize(t.Context(), tx, wrong[0], wrong[1])
			pgtest.RequireField(t, err, wrong[2], wrong[1])
		}
		_, err := register(t, privacy.Config{Tables: []string{"nowhere"}}).Pseudonymize(t.Context(), tx, subject, alias)
		pgtest.RequireField(t, err, "Config.Tables[0]", "no table")
		before := pgtest.Value[string](t, tx, "select current_setting('search_path') || current_setting('lock_timeout') || current_setting('datestyle')")
		_, err = r.Pseudonymize(t.Context(), tx, subject, alias)
		require.NoError(t, err)
		require.Equal(t, before, pgtest.Value[string](t, tx, "select current_setting('search_path') || current_setting('lock_timeout') || current_setting('datestyle')"))
		return nil
	}))
	for _, config := range []privacy.Config{{MaxRows: -1}, {MaxRows: 1_000_001}, {LockTimeout: time.Microsecond}, {Schema: "Metered"}, {Tables: make([]string, 33)}} {
		_, err := privacy.New(config)
		require.ErrorIs(t, err, budget.ErrArgument, "%+v", config)
	}
	niltest.Methods(t, r, map[string][]any{"Pseudonymize": {tx, subject, alias}, "Export": {pool, subject}})
}

// A name is a word, whatever stands around it, and however JSON writes it.
func TestPseudonymize_FindsTheNameAsAWord(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), "create table notes (no int primary key, t text, j json, l text[], b jsonb, many jsonb[])")
	require.NoError(t, err)
	for nth, name := range []string{"user/ann", "ann@example.com", `O'Neil "Né" \\ {x}, 😀`, "a.b*c+(d)|[e]", "тест/анна"} {
		for word, is := range map[string]bool{"": true, "seat/%s/2": true, "by %s.": true, "(%s)": true, "%s,%s": true, "a\n%s\n": true, "\t%s": true,
			"x%s": false, "%sa": false, "%s.smith": false, "%s-b": false, "é%s": false, "%sé": false, "%s_1": false, "up-%s": false, "9%s9": false} {
			text := name
			if word != "" {
				text = strings.ReplaceAll(word, "%s", name)
			}
			_, err := pool.Exec(t.Context(), "truncate notes")
			require.NoError(t, err)
			ascii := strconv.QuoteToASCII(text)
			if strings.ContainsAny(name, "😀") { // Go writes \U
				ascii = strings.ReplaceAll(ascii, `\U0001f600`, `\uD83D\ude00`)
			}
			doc, err := json.Marshal(map[string]any{"v": []string{text}})
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "insert into notes values (1, $1, $2, array[null, $1], $3, array[$3::jsonb])", text, `{"v": [`+ascii+`]}`, string(doc))
			require.NoError(t, err)
			r := register(t, privacy.Config{Tables: []string{"public.notes"}})
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				report, err := r.Pseudonymize(t.Context(), tx, name, alias)
				require.True(t, report.Done)
				require.Equal(t, !is, report.Near > 0, "%d: %s", nth, text)
				return err
			}))
			want := text
			if is {
				want = strings.ReplaceAll(text, name, alias)
			}
			for _, sql := range []string{"t", "j -> 'v' ->> 0", "l[2]", "b -> 'v' ->> 0", "many[1] -> 'v' ->> 0"} {
				require.Equal(t, want, pgtest.Value[string](t, pool, "select "+sql+" from notes"), "%d %s of %q", nth, sql, text)
			}
		}
	}
}

type letterTo struct {
	To string `json:"to"`
}

func (letterTo) Kind() string { return "letter" }

func TestPseudonymize_TakesTheNameOutOfRiversJobs(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	for _, name := range []string{subject, "user/anna"} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := c.Jobs.Enqueue(t.Context(), tx, letterTo{"mail " + name}, &jobs.Options{Key: "letter/" + name, Tenant: name})
			return err
		}))
	}
	report := pseudonymize(t, pool, register(t, privacy.Config{Tables: []string{"river_job"}}))
	require.True(t, report.Done)
	require.Equal(t, []string{`{"to": "mail gone/7f3a"}`, `{"to": "mail user/anna"}`},
		pgtest.Value[[]string](t, pool, "select array_agg(args::text order by id) from river_job"))
	require.False(t, pgtest.Value[bool](t, pool, "select bool_or(j::text ~ 'user/ann\\y') from river_job j"))
	job, err := c.Jobs.Find(t.Context(), pool, "default", "letter/"+alias)
	require.NoError(t, err)
	require.Positive(t, job.ID)
}

// A number is given before the scope has its new name, or after it.
func TestPseudonymize_LeavesTheFeedWhole(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	c, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	require.NoError(t, err)
	for _, scope := range []string{"a", subject, "z"} {
		charge(t, pool, c, scope, 1)
	}
	entries := func() (scopes []string) {
		for e, err := range c.Budget.Feed(ctx, pool, "", budget.FeedOptions{}) {
			require.NoError(t, err)
			scopes = append(scopes, fmt.Sprint(e.Scope, " ", e.Seq))
		}
		return scopes
	}
	require.Equal(t, []string{"a 1", subject + " 1", "z 1"}, entries())
	charge(t, pool, c, subject, 1)
	numbering, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = numbering.Rollback(context.Background()) }()
	_, err = numbering.Exec(ctx, "select metered.number_feed(1)") // the round has come to z
	require.NoError(t, err)
	done := pgtest.Going(func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := register(t, privacy.Config{}).Pseudonymize(ctx, tx, subject, alias)
			return err
		})
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, numbering.Commit(ctx))
	require.NoError(t, <-done)
	require.Zero(t, pgtest.Count(t, pool, "metered.feed_round"))
	charge(t, pool, c, alias, 1)
	require.Equal(t, []string{"a 1", alias + " 1", "z 1", alias + " 2", alias + " 3"}, entries())
}
