package main

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMigrate_CreatesUpgradesAndReportsTheSchema(t *testing.T) {
	t.Parallel()
	l := cli(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}))
	missing := l.exits(exitSchema, "migrate", "status", "--json").objects()[0]
	require.Equal(t, map[string]any{"schema": "metered", "version": 0.0, "wants": float64(metered.SchemaVersion), "ok": false,
		"differences": []any{}, "previous": []any{}}, missing)
	require.Equal(t, "There is no schema metered. Create it with: metered migrate up\n", l.exits(exitSchema, "migrate", "validate").out)
	require.Contains(t, l.exits(exitSchema, "verify").err, "metered migrate up")
	require.Equal(t, float64(metered.SchemaVersion), l.object("migrate", "up", "--river")["to"])
	require.Contains(t, l.ok("migrate"), "as this build needs it")
	require.Contains(t, l.ok("migrate", "up"), "nothing to upgrade")
	other := l.object("migrate", "up", "--schema", "second")
	require.Equal(t, 0.0, other["from"])
	require.Equal(t, "second", l.object("migrate", "status", "--schema", "second")["schema"])
}

func TestMigrate_OfASchemaThatDiffers(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	l := cli(t, pool)
	l.ok("verify")
	execute(t, pool, `alter table metered.holds drop column entity cascade`)
	said := l.exits(exitDifferences, "migrate", "validate").out
	require.Regexp(t, `^Schema metered is of version 2, and \d+ objects differ from what this build needs\n`, said)
	require.Contains(t, said, "\n  column holds.entity is missing\n")
	execute(t, pool, `insert into metered.schema_version (version) values ($1)`, metered.SchemaVersion+2)
	require.Contains(t, l.exits(exitSchema, "usage", "org/acme").err, "use a newer build")
	execute(t, pool, `truncate metered.schema_version`)
	emptied := l.exits(exitSchema, "usage", "org/acme").err
	require.Contains(t, emptied, "schema metered cannot be used: table schema_version says no version")
	require.NotContains(t, emptied, "migrate up", "it would refuse, too")
	require.Contains(t, l.exits(exitDifferences, "migrate", "validate").out, "Schema metered cannot be used: table schema_version says no version")
	require.Contains(t, l.exits(exitSchema, "migrate", "up").err, "says no version")
}

func TestMigrateStatus_NamesTheNextStepOfAnUpgrade(t *testing.T) {
	t.Parallel()
	require.Contains(t, state{Schema: "s", Version: 1, Wants: 2}.String(), "is of version 1, this build needs 2. Upgrade with: metered migrate up")
	require.Contains(t, state{Schema: "s", Version: 2, Wants: 2, OK: true, Previous: []string{"function f()"}}.String(), "metered migrate up --drop-previous")
	require.Contains(t, state{Schema: "s", Version: 2, Wants: 1, OK: true}.String(), "newer than this build, which works with it")
}

func TestMigrateSQL_NeedsNoDatabase(t *testing.T) {
	t.Parallel()
	l := &line{t: t, ctx: t.Context()}
	want, err := metered.SchemaSQL(metered.SchemaSQLOptions{Schema: "mine", From: 1, Tool: "goose"})
	require.NoError(t, err)
	args := []string{"migrate", "sql", "--schema", "mine", "--from", "1", "--tool", "goose"}
	require.Equal(t, want, l.ok(args...))
	require.Equal(t, want, l.object(args...)["sql"])
	require.Contains(t, l.exits(exitUsage, "migrate", "sql", "--tool", "nix").err, `"nix" is not known`)
	require.Contains(t, l.exits(exitUsage, "migrate", "sql", "--from", "99").err, "is 99")
}

func TestUsageEntriesStatementSeries_AgreeWithTheLedger(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	rows := l.objects("usage", "org/acme", "--window", "1h,lifetime")
	require.Equal(t, []any{14.0, -36.0}, values(rows, "used"))
	require.Equal(t, []any{8.0, 8.0}, values(rows, "held"))

	entries := l.objects("entries", "org/acme")
	require.Equal(t, []any{8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0}, values(entries, "seq"))
	require.Equal(t, []any{2.0, 1.0}, values(l.objects("entries", "org/acme", "--before", "3"), "seq"))
	require.Equal(t, []any{7.0, 8.0}, values(l.objects("entries", "org/acme", "--oldest-first", "--after", "6"), "seq"))
	require.Len(t, l.objects("entries", "org/acme", "-n", "2"), 2)
	require.Contains(t, l.ok("entries", "org/acme"), "operation shop order-42")

	statement := l.objects("statement", "org/acme")
	period := statement[len(statement)-1]["period"].(map[string]any)
	require.Equal(t, 16.0, period["charged"])
	require.Equal(t, 14.0, period["billed"])
	require.Equal(t, values(entries[4:], "seq"), []any{4.0, 3.0, 2.0, 1.0})
	require.Len(t, statement, 9)
	second := entries[6]["at"].(string)
	require.Len(t, l.objects("statement", "org/acme", "--to", second), 2, "the first entry, and the sums")
	require.Equal(t, 1.0, l.objects("statement", "org/acme", "--to", second)[0]["seq"])

	sheet, err := csv.NewReader(strings.NewReader(l.ok("statement", "org/acme", "--format", "csv"))).ReadAll()
	require.NoError(t, err)
	require.Len(t, sheet, 9)
	require.Equal(t, csvHead, sheet[0])
	require.Equal(t, `bob, "the builder"`, sheet[2][12])
	require.Equal(t, []string{"-36", "8"}, sheet[8][6:8])

	today := time.Now().UTC().Truncate(24 * time.Hour)
	days := l.objects("series", "org/acme", "--from", today.AddDate(0, 0, -2).Format(time.DateOnly), "--to", today.AddDate(0, 0, 1).Format(time.DateOnly))
	require.Len(t, days, 3)
	total := 0.0
	for _, day := range days {
		total += day["charged"].(float64)
	}
	require.Equal(t, 16.0, total)
	require.Len(t, l.objects("series", "org/acme", "--by", "15m", "--timezone", "Asia/Kathmandu"), 30)
	require.Len(t, l.objects("series", "org/acme", "--by", "month"), 30)
}

func TestHolds_ListsAndShowsOne(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	ids := func(args ...string) []any { return values(l.objects(append([]string{"holds"}, args...)...), "id") }
	require.Equal(t, []any{"seat-1", "seat-21B", "seat-21A"}, ids())
	require.Equal(t, []any{"seat-1", "seat-21A"}, ids("--by-due"))
	require.Equal(t, []any{"seat-21A"}, ids("--by-due", "--tenant", "hall"))
	require.Equal(t, []any{"seat-1", "seat-21A"}, ids("--scope", "org/acme", "--state", "held"))
	require.Equal(t, []any{"seat-21B", "seat-21A"}, ids("--tenant", "hall", "--holder", "ann"))
	require.Equal(t, []any{"seat-21B"}, ids("--tenant", "hall", "--entity", "order-7"))
	require.Equal(t, []any{"seat-1"}, ids("--tenant", ""))
	require.Equal(t, []any{"seat-1", "seat-21B"}, ids("-n", "2"))
	require.Contains(t, l.ok("holds", "-n", "2"), "There are more")
	require.Len(t, ids("-n", "0"), 3)

	one := l.object("hold", "seat-21B", "--tenant", "hall")
	require.Equal(t, "captured", one["hold"].(map[string]any)["state"])
	require.Len(t, one["history"], 2)
	text := l.ok("hold", "seat-21B", "--tenant", "hall")
	require.Contains(t, text, "captured")
	require.Contains(t, text, "order-7")
	unknown := l.exits(exitUnknown, "hold", "seat-21B", "--json")
	require.JSONEq(t, `{"error":"no such hold as \"seat-21B\"; if it has a tenant, give it with --tenant","code":"hold_unknown","exit":5}`, unknown.err)
}

func TestOperation_ShowsItsOutcome(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	o := l.object("operation", "order-42", "--tenant", "shop")
	require.Equal(t, "committed", o["state"])
	require.Equal(t, "order", o["name"])
	require.Equal(t, 5.0, o["charges"].([]any)[0].(map[string]any)["amount"])
	require.Contains(t, l.ok("operation", "order-42", "--tenant", "shop"), "Of its jobs only the ids are known", "it may not read River's table")
	require.Contains(t, cli(t, pool).ok("operation", "order-42", "--tenant", "shop"), "ship")
	refused := l.object("operation", "order-43", "--tenant", "shop")
	require.Equal(t, "refused", refused["state"])
	require.Equal(t, "budget_exceeded", refused["code"])
	require.Contains(t, l.exits(exitUnknown, "operation", "order-42").err, "--tenant")
}

func TestExplain_SaysWhichLimitRefusesAndWhen(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	l.ok("explain", "org/acme", "78", "-l", "hourly=100/1h")
	refused := l.exits(exitRefused, "explain", "org/acme", "79", "-l", "hourly=100/1h", "-l", "1000/1d", "--json").objects()[0]
	require.Equal(t, false, refused["fits"])
	require.Equal(t, "budget_exceeded", refused["code"])
	limits := refused["limits"].([]any)
	require.NotNil(t, limits[0].(map[string]any)["refusal"])
	require.Nil(t, limits[1].(map[string]any)["refusal"])
	at, err := time.Parse(time.RFC3339Nano, refused["fits_at"].(string))
	require.NoError(t, err)
	clock := pgtest.SetClock(t, pool, at)
	release := refused["now"].(string)
	require.Less(t, release, refused["fits_at"].(string))
	clock.Advance(-time.Millisecond)
	l.exits(exitRefused, "explain", "org/acme", "96", "-l", "hourly=100/1h")

	text := l.exits(exitRefused, "explain", "org/acme", "99", "-l", "hourly=100/1h").out
	for _, part := range []string{"would be refused", "COUNTS AGAINST hourly (1h)", "operation shop order-42", "with its charge", "seat-21A"} {
		require.Contains(t, text, part)
	}
	require.Contains(t, l.exits(exitRefused, "explain", "org/acme", "200", "-l", "hourly=100/1h").out, "Waiting does not help")
	require.Contains(t, l.exits(exitRefused, "explain", "org/acme", "1", "--must-exist").out, "no such scope was created")
}

func TestTop_ShowsHotScopesAndWaiters(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	release := pgtest.LockScope(t, pool, c, "org/globex")
	defer release()
	patient, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: time.Hour}})
	require.NoError(t, err)
	waits := pgtest.Going(func() error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return patient.Budget.Lock(t.Context(), tx, "org/globex") })
	})
	pgtest.WaitQueued(t, pool, 1)
	for name, top := range map[string]*line{"as one who reports": l, "as the owner": cli(t, pool)} {
		v := top.object("top", "--count", "1", "--within", "1h")
		hot := v["hot"].(map[string]any)["scopes"].([]any)
		byName := map[string]map[string]any{}
		for _, h := range hot {
			byName[h.(map[string]any)["scope"].(string)] = h.(map[string]any)
		}
		require.Equal(t, 8.0, byName["org/acme"]["entries"], name)
		require.Equal(t, 1.0, byName["org/globex"]["waiting"], name)
		refused := v["refusals"].(map[string]any)["refusals"].([]any)[0].(map[string]any)
		require.Equal(t, "hourly", refused["limit"])
		require.Equal(t, 2.0, v["overview"].(map[string]any)["open_holds"].(map[string]any)["n"])
	}
	text := l.ok("top", "--within", "1h", "--count", "2", "--interval", "100ms")
	require.Equal(t, 4, strings.Count(text, "SCOPE"), "two looks, at hot scopes and at refusals")
	require.NotContains(t, text, "\x1b", "nothing is redrawn where there is no terminal")
	lines := l.objects("top", "--count", "3", "--interval", "100ms")
	require.Len(t, lines, 3)
	l.until = func(out string) bool { return strings.Count(out, "\n") >= 2 }
	l.exits(exitDone, "top", "--json", "--interval", "100ms")
	release()
	require.NoError(t, <-waits)
}

func TestFitted_CutsToTheTerminal(t *testing.T) {
	t.Parallel()
	require.Equal(t, "\x1b[Hab\x1b[K\nüb\x1b[K\x1b[J", fitted("abc\nübe\nghi\n", 2, 2))
	require.Equal(t, "\x1b[Habc\x1b[K\x1b[J", fitted("abc\n", 0, 0))
}

func TestJSON_IsPrintedByEachCommand(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	purse(t, pool, c)
	l := cli(t, pool)
	for _, args := range [][]string{
		{"migrate"}, {"migrate", "status"}, {"migrate", "up"}, {"migrate", "validate"}, {"migrate", "sql"}, {"grant", "maintenance", "x"},
		{"verify"}, {"maintain"}, {"sweep"}, {"purge", "--older-than", "400d"}, {"top", "--count", "1"}, {"usage", "org/acme"}, {"series", "org/acme"}, {"entries", "org/acme"},
		{"statement", "org/acme"}, {"holds"}, {"hold", "seat-1"}, {"operation", "order-42", "--tenant", "shop"}, {"explain", "a", "1"},
		{"wallet", "user/ann"}, {"lots", "user/ann"}, {"statement", "user/ann", "--by-lot"}, {"holds", "--sessions"},
	} {
		require.NotEmpty(t, l.objects(args...), "%v", args)
	}
	require.Empty(t, l.ok("repair-clock", "--json"))
}

func TestParse_LimitsDurationsAndTimes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"1000/1h": `{"max":1000,"window_us":3600000000}`, "day=5/1d": `{"name":"day","max":5,"window_us":86400000000}`,
		"20/lifetime": `{"max":20,"lifetime":true}`, "prepaid": `{"max":0,"prepaid":true}`,
		"a=credit/50": `{"name":"a","max":50,"prepaid":true}`, "1/1d12h": `{"max":1,"window_us":129600000000}`,
		"9/3months":                  `{"max":9,"period":"3 months","time_zone":"UTC"}`,
		"plan=9/month@Europe/Berlin": `{"name":"plan","max":9,"period":"month","time_zone":"Europe/Berlin"}`,
	} {
		limit, err := parseLimit(text)
		require.NoError(t, err, text)
		got, err := json.Marshal(limit)
		require.NoError(t, err)
		require.JSONEq(t, want, string(got), text)
	}
	for _, text := range []string{"", "5", "5/", "/1h", "-1/1h", "5/0s", "5/x", "x/1h", "credit/x", "credit/", "99999999999999999999/1h", "1/-1h", "1/99999d9", "1/month@UTC@x"} {
		_, err := parseLimit(text)
		require.Error(t, err, text)
	}
	for d, want := range map[time.Duration]string{0: "0s", time.Hour: "1h", 90 * time.Minute: "1h30m", 48 * time.Hour: "2d", 49 * time.Hour: "2d1h",
		10 * time.Second: "10s", 10 * time.Minute: "10m", time.Millisecond: "1ms", 24*time.Hour + time.Minute: "24h1m"} {
		require.Equal(t, want, lasting(d))
	}
	for _, text := range []string{"2026-11-23", "2026-11-23T00:00", "2026-11-23 00:00:00", "2026-11-23T00:00:00Z", "2026-11-23T01:00:00+01:00"} {
		at, err := parseTime(text, time.UTC)
		require.NoError(t, err)
		require.True(t, at.Equal(time.Date(2026, 11, 23, 0, 0, 0, 0, time.UTC)), text)
	}
}

// A limit after the beginning of names is of those scopes alone. A scope that no limit names has none.
func TestParse_LimitsOfSomeScopes(t *testing.T) {
	t.Parallel()
	var l scopeLimits
	for _, text := range []string{"org/* a minute=300/1m", "org/* 20000/1d", "wallet/* prepaid"} {
		require.NoError(t, l.Set(text))
	}
	require.Error(t, l.Set("org/* x"))
	require.Equal(t, []budget.Limit{budget.PerWindow(300, time.Minute).Named("a minute"), budget.PerWindow(20_000, 24*time.Hour)}, l[:3].of("org/acme"))
	require.Equal(t, []budget.Limit{budget.Prepaid(0)}, l[:3].of("wallet/1"))
	require.Empty(t, l.of("api/calls"))
	require.NoError(t, l.Set("7/1h"))
	require.Len(t, l.of("api/calls"), 1, "a limit without a pattern is of all scopes")
}

// A scope without entries used nothing, or its name is mistyped: nobody may take the one for the other.
func TestScopes_WithoutEntriesAreSaid(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	for _, command := range []string{"usage", "series", "entries", "statement"} {
		r := l.exits(exitUnknown, command, "org/acmee")
		require.Equal(t, "metered: scope \"org/acmee\" has no entries\n", r.err)
		require.Empty(t, r.out, command)
	}
	r := l.exits(exitUnknown, "usage", "org/acmee", "org/acme", "--json")
	require.Equal(t, []any{"org/acme"}, values(r.objects(), "scope"), "the others are there")
	require.JSONEq(t, `{"error":"scope \"org/acmee\" has no entries","code":"not_found","exit":5}`, r.err)
	require.Contains(t, l.ok("explain", "org/acmee", "5"), "The scope has no entries.")
	require.NotContains(t, l.ok("explain", "org/acme", "5"), "no entries")
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Create(t.Context(), tx, "org/new")
		return err
	}))
	require.Equal(t, []any{0.0}, values(l.objects("usage", "org/new"), "used"), "it was declared")
}

func TestErrors_AreSaidOnceAndNameTheSchema(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	l := cli(t, pool)
	l.ok("migrate", "up", "--schema", "second")
	database := pgtest.Value[string](t, pool, `select current_database()`)
	require.Equal(t, "metered: database "+database+" has no schema metered of metered: create it with metered migrate up, or name another with --schema\n",
		l.exits(exitSchema, "usage", "org/acme").err)
	execute(t, pool, `alter table second.leases rename to gone`)
	said := l.exits(exitDifferences, "migrate", "validate", "--schema", "second")
	require.NotContains(t, said.out, "metered.")
	require.Contains(t, said.out, "\n  table leases is missing\n")
	require.NotContains(t, said.out, "column leases.", "the table stands for them")
	require.Less(t, len(said.out), 2000)
	all := l.exits(exitDifferences, "migrate", "validate", "--schema", "second", "--json").out
	require.Contains(t, all, `\"second\".leases`)
	require.NotContains(t, all, "metered.")
	failed := l.exits(exitSchema, "sweep", "--schema", "second").err
	require.Contains(t, failed, `something is missing in schema second: list leases: ERROR: relation "second.leases" does not exist`)
	require.NotContains(t, failed, "metered: metered")
	require.Equal(t, 1, strings.Count(failed, "metered: "), failed)
}

func TestVersion_SaysBuildLibraryAndSchema(t *testing.T) {
	t.Parallel()
	l := &line{t: t, ctx: t.Context()}
	require.Regexp(t, fmt.Sprintf(`^metered \S+ \(library \S+, schema version %d\)\n$`, metered.SchemaVersion), l.ok("--version"))
	require.Equal(t, "metered: requires at least 1 arg(s), only received 0\nUsage: metered usage SCOPE... [flags]\nSee metered usage --help.\n",
		l.exits(exitUsage, "usage").err)
}
