package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// runAsProgram makes this test binary the program.
const runAsProgram = "METERED_RUN_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(runAsProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// program is the program as a process of its own.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // a hang fails the test
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), runAsProgram+"=1")
	return c
}

// get returns the status and the body of a page.
func get(t *testing.T, url, host string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	r.Host = host
	answer, err := pgtest.HTTP.Do(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(body)
}

func TestServe_ServesThePageToThisMachine(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := as(t, pool, metered.GrantReportingSQL)
	l.until = func(out string) bool {
		if !strings.Contains(out, "\n") {
			return false
		}
		url := strings.Fields(out)[4]
		status, body := get(t, url, "")
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, body, "org/acme")
		for _, host := range []string{"localhost:1", "LOCALHOST", "[::1]", "[::1]:80", "127.0.0.1"} {
			status, _ = get(t, url+"scope?scope=org%2Facme", host)
			require.Equal(t, http.StatusOK, status, host)
		}
		status, body = get(t, url, "rebound.example")
		require.Equal(t, http.StatusMisdirectedRequest, status)
		require.NotContains(t, body, "org/acme")
		return true
	}
	l.ok("serve", "--listen", "127.0.0.1:0", "--limit", "hourly=100/1h")

	l.until = nil
	require.Contains(t, l.exits(exitUsage, "serve", "--listen", "0.0.0.0:0").err, "--allow-remote")
	require.Contains(t, l.exits(exitUsage, "serve", "--listen", "127.0.0.1:0", "--river-ui", "nonsense").err, "RiverUI")
	l.exits(exitUsage, "serve", "--timezone", "Nowhere/Land")
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	require.Contains(t, l.exits(exitFailed, "serve", "--listen", taken.Addr().String()).err, "address already in use")
	l.until = func(out string) bool { return out != "" }
	require.NotEmpty(t, l.object("serve", "--listen", "0.0.0.0:0", "--allow-remote")["page"])
}

// limitRow is a row of the table of limits: the name, and the units used, held, leased, in all, and that are left.
var limitRow = regexp.MustCompile(`<tr><th scope="row" class="name"><bdi>([^<]*)</bdi></th><td class="n">([^<]*)</td><td class="n">([^<]*)</td><td class="n">([^<]*)</td><td class="n">([^<]*)</td><td class="n">([^<]*)</td><td><meter`)

func units(t *testing.T, text string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.ReplaceAll(strings.ReplaceAll(text, "\u202f", ""), "−", "-"), 10, 64)
	require.NoError(t, err)
	return n
}

// One command starts a Postgres, a load and the page, and Ctrl-C ends it all. The page shows each scope of the load
// with its own limits, none of which is exceeded.
func TestDemo_RunsALoadAndGoesWithoutATrace(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	c := program(t, "demo", "--listen", "127.0.0.1:0", "--rate", "100", "--json")
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	var errs lockedBuffer
	c.Stderr = &errs
	require.NoError(t, c.Start())
	var at struct {
		Page string `json:"page"`
		URL  string `json:"database_url"`
	}
	require.NoError(t, json.NewDecoder(out).Decode(&at), errs.String())
	conn, err := pgx.Connect(t.Context(), at.URL)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	directory := pgtest.Value[string](t, conn, "show data_directory")
	for what, sql := range map[string]string{
		"charges":  `select exists (select from metered.operations where refusal is null)`,
		"refusals": `select exists (select from metered.operations where refusal is not null)`,
		"holds":    `select exists (select from metered.holds)`,
		"endings":  `select exists (select from metered.holds where state in ('c', 'r'))`,
		"leases":   `select exists (select from metered.leases)`,
		"jobs":     `select exists (select from river_job where state = 'completed')`,
		"refunds":  `select exists (select from metered.ledger where kind = 'r')`,
		"credit":   `select exists (select from metered.ledger where kind = 'd')`,
		"captures": `select exists (select from metered.ledger where kind = 'u')`,
		"lots":     `select exists (select from metered.lots where drawn > 0)`,
		"sessions": `select exists (select from metered.holds where id like 'session_%')`,
		"a line":   `select exists (select from metered.parked_jobs)`,
		"prints":   `select exists (select from river_job where kind = 'print' and state = 'completed')`,
		"levels":   `select exists (select from river_job where kind = 'mail')`,
	} {
		pgtest.WaitFor(t, what, func() bool { return pgtest.Value[bool](t, conn, sql) })
	}
	status, body := get(t, at.Page, "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "org/0000")
	rows, err := conn.Query(t.Context(), `select distinct on (split_part(scope, '/', 1)) scope from metered.ledger order by split_part(scope, '/', 1), at desc`)
	require.NoError(t, err)
	scopes, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Len(t, scopes, 4)
	for _, scope := range append(scopes, "org/0000") {
		_, body := get(t, at.Page+"scope?scope="+url.QueryEscape(scope), "")
		found := limitRow.FindAllStringSubmatch(body, -1)
		require.Len(t, found, len(demoLimits(scope)), scope)
		for i, row := range found {
			used, held, leased, of, room := units(t, row[2]), units(t, row[3]), units(t, row[4]), units(t, row[5]), units(t, row[6])
			require.Equal(t, demoLimits(scope)[i].Name, row[1])
			require.GreaterOrEqual(t, min(used, held, leased, room), int64(0), "%s: %v", scope, row)
			require.Equal(t, of, used+held+leased+room, "%s: %v", scope, row)
		}
		require.NotContains(t, body, "<dd>−", "nothing of %s is negative", scope)
	}
	l := &line{t: t, ctx: t.Context(), url: at.URL}
	l.ok("verify")
	require.NotEmpty(t, l.object("top", "--count", "1")["hot"].(map[string]any)["scopes"])

	require.NoError(t, c.Process.Signal(os.Interrupt))
	require.NoError(t, c.Wait(), errs.String())
	require.NotContains(t, errs.String(), "load:")
	require.NoDirExists(t, directory)
	require.Error(t, conn.Ping(t.Context()))
}

// Signals end the program at every stage, with its exit codes.
func TestSignals_EndTheProgram(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	locked, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = locked.Exec(t.Context(), `lock table metered.ledger`)
	require.NoError(t, err)
	for _, signal := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		c := program(t, "entries", "org/acme", "--database-url", pgtest.ConnString(pool))
		require.NoError(t, c.Start())
		pgtest.WaitQueued(t, pool, 1)
		require.NoError(t, c.Process.Signal(signal))
		var exit *exec.ExitError
		require.ErrorAs(t, c.Wait(), &exit)
		require.Equal(t, exitInterrupted, exit.ExitCode())
		pgtest.WaitFor(t, "its backend to go", func() bool { return pgtest.Queued(t, pool) == 0 })
	}
	require.NoError(t, locked.Rollback(t.Context()))
}

// On a terminal top redraws in place, and leaves the screen as it was.
func TestTop_RedrawsInPlaceOnATerminal(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	c := program(t, "top", "--within", "1h", "--interval", "100ms", "--database-url", pgtest.ConnString(pool))
	terminal, err := pty.StartWithSize(c, &pty.Winsize{Rows: 12, Cols: 60})
	require.NoError(t, err)
	defer terminal.Close()
	r := bufio.NewReader(terminal)
	read := func(upTo byte) string {
		text, err := r.ReadString(upTo)
		require.NoError(t, err)
		return text
	}
	begun := read('H')
	require.Equal(t, enterScreen+"\x1b[H", begun)
	for range 2 {
		frame := read('J')
		require.Contains(t, frame, "org/acme")
		lines := strings.Split(strings.TrimPrefix(frame, "\x1b[H"), "\r\n")
		require.LessOrEqual(t, len(lines), 12)
		for _, line := range lines {
			require.LessOrEqual(t, len([]rune(strings.NewReplacer("\x1b[K", "", "\x1b[J", "").Replace(line))), 60)
		}
	}
	_, err = terminal.Write([]byte{3}) // Ctrl-C
	require.NoError(t, err)
	rest, _ := io.ReadAll(r) // ends with an error of the terminal's, as the program does
	require.NoError(t, c.Wait())
	require.True(t, strings.HasSuffix(string(rest), leaveScreen), "%q", rest)
}

// On a terminal a long command shows a bar, and takes it away again.
func TestVerify_ShowsABarOnATerminal(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select 1, 1, clock_timestamp(), 1, 0, 0, 0, 0, 'c', 'scope ' || n from generate_series(1, 300) n`)
	execute(t, pool, `analyze metered.ledger`)
	c := program(t, "verify", "--database-url", pgtest.ConnString(pool))
	terminal, err := pty.StartWithSize(c, &pty.Winsize{Rows: 12, Cols: 120})
	require.NoError(t, err)
	defer terminal.Close()
	out, _ := io.ReadAll(terminal)
	require.NoError(t, c.Wait())
	require.Contains(t, string(out), "entries verified")
	require.Contains(t, string(out), "309 entries of 302 scopes, 0 differences.")
}
