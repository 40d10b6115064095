package schema_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// v1Case is one of testdata/v1.json: a call with its answer, or a statement.
type v1Case struct {
	Name, SQL, Call, Error string
	With                   map[string]json.RawMessage
	Answer                 json.RawMessage
	Has, Lacks             []string
}

// statement is the case as SQL. Each argument is a literal without a type, as a driver sends it.
func (c v1Case) statement(t *testing.T) string {
	if c.SQL != "" {
		return c.SQL
	}
	var args []string
	for _, name := range slices.Sorted(maps.Keys(c.With)) {
		value := string(c.With[name])
		var text string
		if json.Unmarshal(c.With[name], &text) == nil {
			value = text
		}
		args = append(args, fmt.Sprintf("%s => '%s'", name, strings.ReplaceAll(value, "'", "''")))
	}
	require.NotEmpty(t, c.Call, c.Name)
	return fmt.Sprintf("select metered.%s(%s)::text", c.Call, strings.Join(args, ", "))
}

// The contract of the functions v1_*: each case in testdata/v1.json has its answer. An application's
// role makes the calls.
func TestV1_AnswersAsItsCasesSay(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/v1.json")
	require.NoError(t, err)
	var cases []v1Case
	require.NoError(t, json.Unmarshal(text, &cases))
	require.Greater(t, len(cases), 60)
	pool := pgtest.Open(t)
	conn, err := pgtest.AsRole(t, pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), "").Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for _, c := range cases {
		if c.Answer == nil {
			_, err := conn.Exec(t.Context(), c.statement(t))
			var failed *pgconn.PgError
			if c.Error != "" && (!errors.As(err, &failed) || failed.Code != c.Error) || c.Error == "" && err != nil {
				t.Errorf("%s: %v", c.Name, err)
			}
			continue
		}
		var answer string
		require.NoError(t, conn.QueryRow(t.Context(), c.statement(t)).Scan(&answer), c.Name)
		var whole map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(answer), &whole), c.Name)
		fits := pgtest.Value[bool](t, conn, "select $1::text::jsonb @> $2::text::jsonb", answer, string(c.Answer))
		for _, name := range c.Has {
			fits = fits && whole[name] != nil
		}
		for _, name := range c.Lacks {
			fits = fits && whole[name] == nil
		}
		if !fits {
			t.Errorf("%s: %s", c.Name, answer)
		}
	}
}

// A note that is no object, and limits that are null or no list, are refused by each function that takes them.
func TestV1_RefusesNotesAndLimitsOfAnotherKind(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for call, takes := range map[string]string{
		"v1_charge('a', 1, %s)": "limits", "v1_check('a', 1, %s)": "limits", "v1_usage('a', %s)": "limits", "v1_hold('t', 'h', 'a', 1, '1 hour', %s)": "limits",
		"v1_charge('a', 1, note => %s)": "note", "v1_check('a', 1, note => %s)": "note", "v1_credit('a', 1, %s)": "note", "v1_refund('a', 1, 1, %s)": "note",
		"v1_hold('t', 'h', 'a', 1, '1 hour', note => %s)": "note", "v1_capture('t', 'h', 1, %s)": "note", "v1_release('t', 'h', %s)": "note",
	} {
		wrong := []string{`'"text"'`, "'1'", "'[1]'"}
		if takes == "limits" {
			wrong = []string{`'"text"'`, "'1'", "'{}'", "null", "'null'", "'[1]'", "'[null]'", `'[{"max": 1}]'`}
		}
		for _, value := range wrong {
			_, err := pool.Exec(t.Context(), "select metered."+fmt.Sprintf(call, value))
			var refused *pgconn.PgError
			require.ErrorAs(t, err, &refused, call+value)
			require.Equal(t, "22023", refused.Code, "%s of %s: %v", call, value, err)
			if takes == "limits" {
				require.Equal(t, "out of bounds: limits", refused.Message, "%s of %s", call, value)
			}
		}
	}
	for _, call := range []string{"v1_charge('a', 1, $1)", "v1_check('a', 1, $1)", "v1_usage('a', $1)", "v1_hold('t', 'h', 'a', 1, '1 hour', $1)"} {
		_, err := pool.Exec(t.Context(), "select metered."+call, `[{"max": 5, "lifetime": true}, {"max": 9, "windw": "1 hour"}]`)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, call)
		require.Equal(t, `{"max": 9, "windw": "1 hour"}`, refused.Detail, "the wrong one of two is named by %s", call)
		require.Contains(t, refused.Hint, "one of window, period, lifetime and prepaid")
	}
	require.Zero(t, pgtest.Value[int](t, pool, "select count(*) from metered.ledger"))
}

// The usage of a scope in SQL has the numbers of usage_of, which Go calls: with a hold that is open and one that is due, and a
// charge of which units were given back.
func TestV1_UsageIsThatOfTheTypedFunction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for _, statement := range []string{
		"select metered.v1_credit('org/a', 100)", "select metered.v1_charge('org/a', 7)", "select metered.v1_charge('org/a', 5)",
		"select metered.v1_refund('org/a', 2, 3)", "select metered.v1_hold('t', 'open', 'org/a', 11, '1 hour')",
		"select metered.v1_hold('t', 'due', 'org/a', 13, '1 microsecond')", "select metered.v1_charge('org/a', 1)",
	} {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
	limits := `[{"max": 50, "window": "1 hour"}, {"max": 50, "lifetime": true}, {"max": 50, "period": "day", "time_zone": "UTC"}, {"prepaid": true}]`
	for _, scope := range []string{"org/a", "org/none"} {
		want := pgtest.Value[string](t, pool, `select json_agg(json_build_array(u.used, u.held + u.leased, u.charges))::jsonb::text
			from metered.usage_of(array[$1, $1, $1, $1], array['1 hour', '0', null, '0']::interval[],
				array[null, null, row('1 day', null, 'UTC')::metered.period, null], true) u`, scope)
		require.Equal(t, want, pgtest.Value[string](t, pool, `select jsonb_agg(jsonb_build_array(l -> 'used', l -> 'held', l -> 'charges') order by n)::text
			from jsonb_array_elements(metered.v1_usage($1, $2::jsonb) -> 'limits') with ordinality y(l, n)`, scope, limits), scope)
	}
	require.Equal(t, `{"ok": true, "held": 11, "used": -90, "spent": 13, "charges": 3, "credited": 100, "refunded": 3}`,
		pgtest.Value[string](t, pool, "select metered.v1_usage('org/a')::text"))
	_, err := pool.Exec(t.Context(), "select metered.v1_usage(null)")
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "22023", refused.Code)
}

// An id carries the same time for SQL as for Go, whose records it may meet.
func TestV1_ReadsTheTimeOfAnIDAsGoDoes(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	good := uuidv7.New()
	carry := 0
	for _, id := range []string{
		good, strings.ToUpper(good), "0190a5c6-0000-7000-8000-000000000000", "0190a5c6-0000-7000-b000-00000000000F",
		good[:14] + "4" + good[15:], good[:19] + "c" + good[20:], good[:19] + "7" + good[20:],
		good + "0", good[1:], good[:35] + "g", good[:8] + "0" + good[9:], " " + good[1:], good[:35] + "é", "order-1", "",
	} {
		var got *time.Time
		require.NoError(t, pool.QueryRow(t.Context(), "select metered._v1_issued($1)", id).Scan(&got))
		want := uuidv7.Time(id)
		require.Equal(t, want == nil, got == nil, id)
		if want != nil {
			require.True(t, want.Equal(*got), "%s: %v, and not %v", id, got, want)
			carry++
		}
	}
	require.Equal(t, 4, carry)
}

// The statements of docs/sql.md run one after the other, and do what it says.
func TestV1_StatementsOfItsPageRun(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/sql.md")
	require.NoError(t, err)
	pool := pgtest.Open(t)
	statements := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	require.Len(t, statements, 3)
	for _, s := range statements {
		_, err := pool.Exec(t.Context(), s[1], pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err, s[1])
	}
	require.Equal(t, int64(3), pgtest.Value[int64](t, pool, "select spent from metered.ledger where scope = 'org/acme' order by seq desc limit 1"))
	require.Equal(t, `{"order": 1}`, pgtest.Value[string](t, pool, "select convert_from(result, 'UTF8') from metered.operations where id = 'order-1'"))
	require.Equal(t, "gpu", pgtest.Value[string](t, pool, `select l.scope from river_job j join metered.holds h on h.id = j.metadata ->> 'metered:hold'
		join metered.hold_lines l on l.hold = h.no where j.kind = 'render' and h.tenant = 'acme' and j.state = 'available'`))
}

// The cases from psql, which sends literals.
func TestV1_FromPsql(t *testing.T) {
	t.Parallel()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not there")
	}
	cases, err := os.ReadFile("testdata/v1.json")
	require.NoError(t, err)
	pool := pgtest.Open(t)
	cmd := exec.CommandContext(t.Context(), psql, "-qX", "-v", "ON_ERROR_STOP=1", "-v", "cases="+string(cases),
		"-f", "testdata/v1.psql", pgtest.ConnString(pool))
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, string(said))
	require.Equal(t, int64(3), pgtest.Value[int64](t, pool, "select spent from metered.ledger where scope = 'org/a' order by seq desc limit 1"))
}
