package budget_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// untouchable is a transaction that must not be used.
type untouchable struct {
	pgx.Tx
	t *testing.T
}

func (u untouchable) Query(context.Context, string, ...any) (pgx.Rows, error) {
	u.t.Fatal("a refused argument must not reach the database")
	return nil, nil
}

func (u untouchable) QueryRow(context.Context, string, ...any) pgx.Row {
	u.t.Fatal("a refused argument must not reach the database")
	return nil
}

// badTexts are refused wherever a text of at most 255 bytes is asked for.
var badTexts = map[string]string{
	"is 256 bytes long, want at most 255": strings.Repeat("a", 256),
	"is 257 bytes long, want at most 255": strings.Repeat("a", 255) + "é",
	"is not valid UTF-8":                  "a\xff",
	"contains a zero byte":                "a\x00b",
}

func TestNew_RefusesWrongConfig(t *testing.T) {
	t.Parallel()
	for field, cfgs := range map[string][]budget.Config{
		"Config.Schema":         {{Schema: "pg_metered"}, {Schema: "Metered"}, {Schema: "9"}, {Schema: `a"b`}, {Schema: strings.Repeat("a", 64)}},
		"Config.LockTimeout":    {{LockTimeout: -1}, {LockTimeout: time.Millisecond - 1}, {LockTimeout: time.Hour + 1}},
		"Config.ClockTolerance": {{ClockTolerance: -1}, {ClockTolerance: time.Microsecond - 1}, {ClockTolerance: 24*time.Hour + 1}},
	} {
		for _, cfg := range cfgs {
			_, err := budget.New(cfg)
			requireArgument(t, err, field)
		}
	}
}

func requireArgument(t *testing.T, err error, field string) {
	t.Helper()
	require.ErrorIs(t, err, budget.ErrArgument, field)
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, field, argument.Field)
	require.NotEmpty(t, argument.Reason)
	require.Equal(t, "invalid_argument", argument.Code())
}

func TestCharge_RefusesWrongArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), untouchable{t: t}
	l := newLedger(t, budget.Config{})
	ok := budget.Charge{Scope: "a", Amount: 1}
	with := func(change func(c *budget.Charge)) []budget.Charge {
		c := ok
		change(&c)
		return []budget.Charge{ok, c}
	}
	limited := func(limits ...budget.Limit) []budget.Charge {
		return with(func(c *budget.Charge) { c.Limits = limits })
	}
	var tooMany []budget.Charge
	for i := range bounds.MaxScopes + 1 {
		tooMany = append(tooMany, budget.Charge{Scope: string(rune('A' + i)), Amount: 1})
	}
	distinct := func(from int) (limits []budget.Limit) {
		for i := range 9 {
			limits = append(limits, budget.Lifetime(int64(from+i)))
		}
		return limits
	}
	type refused struct {
		field   string
		charges []budget.Charge
	}
	table := []refused{
		{"charges", nil},
		{"charges", tooMany},
		{"charges[1].Scope", with(func(c *budget.Charge) { c.Scope = "" })},
		{"charges[1].Amount", with(func(c *budget.Charge) { c.Amount = 0 })},
		{"charges[1].Amount", with(func(c *budget.Charge) { c.Amount = -1 })},
		{"charges[1].Amount", with(func(c *budget.Charge) { c.Amount = bounds.MaxAmount + 1 })},
		{"charges[1].Amount", with(func(c *budget.Charge) { c.Amount = bounds.MaxAmount })}, // 1 more together
		{"charges[1].Limits", limited(make([]budget.Limit, bounds.MaxLimits+1)...)},
		{"charges[1].Limits", []budget.Charge{{Scope: "a", Amount: 1, Limits: distinct(0)}, {Scope: "a", Amount: 1, Limits: distinct(100)}}},
		{"charges[1].Limits[1].Max", limited(budget.Prepaid(0), budget.Lifetime(-1))},
		{"charges[1].Limits[0].Max", limited(budget.Lifetime(bounds.MaxLimit + 1))},
		{"charges[1].Limits[0].Window", limited(budget.Limit{Max: 2})},
		{"charges[1].Limits[0].Window", limited(budget.Limit{Window: -time.Second})},
		{"charges[1].Limits[0].Window", limited(budget.Limit{Window: -1})},
		{"charges[1].Limits[0].Window", limited(budget.Limit{Window: bounds.MaxWindow + time.Microsecond})},
		{"charges[1].Limits[0].Window", limited(budget.Limit{Window: time.Microsecond + 1})},
		{"charges[1].Note", with(func(c *budget.Charge) { c.Note.Actor = "somebody else" })},
	}
	for _, text := range badTexts {
		table = append(table,
			refused{"charges[1].Scope", with(func(c *budget.Charge) { c.Scope = text })},
			refused{"charges[1].Note.Actor", with(func(c *budget.Charge) { c.Note.Actor = text })},
			refused{"charges[1].Note.Tenant", with(func(c *budget.Charge) { c.Note.Tenant = text })},
			refused{"charges[1].Note.Correlation", with(func(c *budget.Charge) { c.Note.Correlation = text })},
			refused{"charges[1].Note.Reason", with(func(c *budget.Charge) { c.Note.Reason = text })},
		)
	}
	for _, r := range table {
		_, err := l.Charge(ctx, tx, r.charges...)
		requireArgument(t, err, r.field)
		_, err = l.Check(ctx, tx, r.charges...)
		requireArgument(t, err, r.field)
		_, err = prepareCharges(l, r.charges...)
		requireArgument(t, err, r.field)
	}
}

func TestOtherCalls_RefuseWrongArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), untouchable{t: t}
	l := newLedger(t, budget.Config{})
	noPool := new(pgxpool.Pool) // would panic if it were used
	entries := func(scope string, opts budget.EntriesOptions) error {
		n := 0
		var last error
		for _, err := range l.Entries(ctx, tx, scope, opts) {
			n++
			last = err
		}
		require.Equal(t, 1, n, "the error is the last element")
		return last
	}
	credit := func(c budget.Credit) error { _, err := l.Credit(ctx, tx, c); return err }
	refund := func(r budget.Refund) error { _, err := l.Refund(ctx, tx, r); return err }
	repair := func(scope string, note budget.Note) error { _, err := l.RepairClock(ctx, tx, scope, note); return err }
	usage := func(queries ...budget.Query) error { _, err := l.Usage(ctx, tx, queries...); return err }
	verify := func(o budget.VerifyOptions) error { _, err := l.Verify(ctx, noPool, o); return err }
	purge := func(o budget.PurgeOptions) error { _, err := l.Purge(ctx, noPool, o); return err }

	requireArgument(t, credit(budget.Credit{Amount: 1}), "Credit.Scope")
	requireArgument(t, credit(budget.Credit{Scope: "a"}), "Credit.Amount")
	requireArgument(t, credit(budget.Credit{Scope: "a", Amount: bounds.MaxAmount + 1}), "Credit.Amount")
	requireArgument(t, refund(budget.Refund{Seq: 1, Amount: 1}), "Refund.Scope")
	requireArgument(t, refund(budget.Refund{Scope: "a", Amount: 1}), "Refund.Seq")
	requireArgument(t, refund(budget.Refund{Scope: "a", Seq: -1, Amount: 1}), "Refund.Seq")
	requireArgument(t, refund(budget.Refund{Scope: "a", Seq: 1}), "Refund.Amount")
	requireArgument(t, repair("", budget.Note{}), "scope")
	requireArgument(t, l.Lock(ctx, tx), "scopes")
	requireArgument(t, l.Lock(ctx, tx, "a", ""), "scopes[1]")
	tooMany := make([]string, bounds.MaxScopes+1)
	for i := range tooMany {
		tooMany[i] = string(rune('A' + i))
	}
	requireArgument(t, l.Lock(ctx, tx, tooMany...), "scopes")
	requireArgument(t, usage(), "queries")
	requireArgument(t, usage(make([]budget.Query, bounds.MaxQueries+1)...), "queries")
	requireArgument(t, usage(budget.Query{Scope: "a"}, budget.Query{}), "queries[1].Scope")
	requireArgument(t, usage(budget.Query{Scope: "a", Window: -1}), "queries[0].Window")
	requireArgument(t, usage(budget.Query{Scope: "a", Window: 1}), "queries[0].Window")
	requireArgument(t, entries("", budget.EntriesOptions{}), "scope")
	requireArgument(t, entries("a", budget.EntriesOptions{After: -1}), "EntriesOptions.After")
	requireArgument(t, entries("a", budget.EntriesOptions{Before: -1}), "EntriesOptions.Before")
	requireArgument(t, entries("a", budget.EntriesOptions{Max: -1}), "EntriesOptions.Max")
	requireArgument(t, verify(budget.VerifyOptions{MaxDifferences: -1}), "VerifyOptions.MaxDifferences")
	requireArgument(t, purge(budget.PurgeOptions{}), "PurgeOptions.OlderThan")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: time.Hour, DryRun: true, Forget: func(string) bool { return true }}), "PurgeOptions.DryRun")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: -time.Hour}), "PurgeOptions.OlderThan")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: 1}), "PurgeOptions.OlderThan")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: bounds.MaxWindow + time.Hour}), "PurgeOptions.OlderThan")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: time.Hour, Batch: 15}), "PurgeOptions.Batch")
	requireArgument(t, purge(budget.PurgeOptions{OlderThan: time.Hour, Batch: 100_001}), "PurgeOptions.Batch")
	for _, text := range badTexts {
		requireArgument(t, credit(budget.Credit{Scope: text, Amount: 1}), "Credit.Scope")
		requireArgument(t, credit(budget.Credit{Scope: "a", Amount: 1, Note: budget.Note{Actor: text}}), "Credit.Note.Actor")
		requireArgument(t, refund(budget.Refund{Scope: text, Seq: 1, Amount: 1}), "Refund.Scope")
		requireArgument(t, refund(budget.Refund{Scope: "a", Seq: 1, Amount: 1, Note: budget.Note{Tenant: text}}), "Refund.Note.Tenant")
		requireArgument(t, repair(text, budget.Note{}), "scope")
		requireArgument(t, repair("a", budget.Note{Reason: text}), "note.Reason")
		requireArgument(t, usage(budget.Query{Scope: text}), "queries[0].Scope")
		requireArgument(t, entries(text, budget.EntriesOptions{}), "scope")
		requireArgument(t, verify(budget.VerifyOptions{Scope: text}), "VerifyOptions.Scope")
		requireArgument(t, verify(budget.VerifyOptions{After: text}), "VerifyOptions.After")
		requireArgument(t, purge(budget.PurgeOptions{OlderThan: time.Hour, Scope: text}), "PurgeOptions.Scope")
	}
}

func TestArguments_LargestTextsAreStored(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	text := strings.Repeat("é", 127) + "z"
	require.Len(t, text, bounds.MaxScopeBytes)
	note := budget.Note{Actor: text, Tenant: text, Correlation: text, Reason: text}
	_, err := l.Charge(ctx, autocommit{Querier: pool}, budget.Charge{Scope: text, Amount: 1, Note: note})
	require.NoError(t, err)
	for e, err := range l.Entries(ctx, pool, text, budget.EntriesOptions{}) {
		require.NoError(t, err)
		require.Equal(t, note, e.Note)
	}
}
