package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The program is built and run as a user would, one run after the other: each brings a Postgres of its own.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "quickstart")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	program := func(t *testing.T, args ...string) *exec.Cmd {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // the machine may be busy
		t.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Dir = t.TempDir() // not that of the repository
		return cmd
	}

	t.Run("UploadsTheFilesGiven", func(t *testing.T) {
		dir := t.TempDir()
		files := []string{filepath.Join(dir, "page.html"), filepath.Join(dir, "ä picture?.png"), filepath.Join(dir, "empty")}
		for i, content := range []string{"<!DOCTYPE html><p>hello", "\x89PNG\r\n\x1a\n" + strings.Repeat("x", 100_000), ""} {
			require.NoError(t, os.WriteFile(files[i], []byte(content), 0o600))
		}
		out := requireSuccess(t, program(t, files...))
		require.Regexp(t, `page\.html +23 +text/html; charset=utf-8 `, out)
		require.Regexp(t, `ä picture\?\.png +100008 +image/png `, out)
		require.Regexp(t, `empty +0 +text/plain; charset=utf-8 +e3b0c44298fc1c14…`, out)
	})

	t.Run("UploadsTheRepositorysOwnAndLeavesNothingOnTheServerOfDATABASE_URL", func(t *testing.T) {
		server, role := serverWithPlainRole(t)
		cmd := program(t)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+role)
		out := requireSuccess(t, cmd)
		require.Contains(t, out, "using the server of DATABASE_URL")
		require.Regexp(t, `schema\.sql +\d+ +text/plain`, out)
		require.Empty(t, databases(t, server))
	})

	t.Run("RefusesAnUnreadableFile", func(t *testing.T) {
		cmd := program(t, "/no/such/file")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Equal(t, 1, cmd.ProcessState.ExitCode())
		require.Equal(t, "quickstart: cannot read a file to upload: "+
			"open /no/such/file: no such file or directory\n", string(out))
	})

	t.Run("CleansUpWhenInterrupted", func(t *testing.T) {
		server, role := serverWithPlainRole(t)
		cmd := program(t)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+role)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(stdout)
		for lines.Scan() && !strings.HasPrefix(lines.Text(), "A race") {
		}
		require.NoError(t, cmd.Process.Signal(os.Interrupt))
		rest, err := io.ReadAll(stdout)
		require.NoError(t, err)
		require.Error(t, cmd.Wait())
		require.Equal(t, 1, cmd.ProcessState.ExitCode())
		require.Contains(t, stderr.String(), "quickstart: interrupted: ")
		require.NotContains(t, string(rest), "Result")
		require.Empty(t, databases(t, server))
	})
}

// An error's own text names scopes and rules. A client gets a code, and a fixed text.
func TestRefusal_SaysNothingOfTheErrorsText(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), uploadsSQL)
	require.NoError(t, err)
	a, err := newApp(pool, map[string]plan{"acme": {Hourly: 10, Daily: 20}})
	require.NoError(t, err)
	server := httptest.NewServer(a.handler())
	t.Cleanup(server.Close)
	minted, err := a.mint(t.Context(), "acme", grant{"f", 1000}, grant{"g", 1000})
	require.NoError(t, err)
	first, second := minted[0].Token.Reveal(), minted[1].Token.Reveal()
	id := metered.NewID()
	c := newClient(server.URL)
	for _, test := range []struct {
		request sent
		code    string
	}{
		{sent{id, "acme", first, file{"f", []byte("x")}}, ""},
		{sent{id, "acme", first, file{"f", []byte("y")}}, "operation_conflict"},
		{sent{metered.NewID(), "acme", second, file{"g", make([]byte, 50)}}, "budget_exceeded"},
		{sent{metered.NewID(), "acme", first, file{"f", []byte("x")}}, "token_invalid"},
		{sent{metered.NewID(), "other", second, file{"g", []byte("x")}}, "token_invalid"},
		{sent{"", "acme", second, file{"g", []byte("x")}}, "idempotency_key_invalid"},
		{sent{"03bb2cc3-d800-7fff-bfff-ffffffffffff", "acme", second, file{"g", []byte("x")}}, "operation_future"},
	} {
		answer, err := c.upload(t.Context(), test.request)
		require.NoError(t, err)
		require.Equal(t, test.code, answer.problem.Code, answer.body)
		if test.code != "idempotency_key_invalid" { // its text is the library's
			require.Equal(t, messages[test.code], answer.problem.Detail)
		}
		require.Equal(t, test.code == "", answer.problem.Detail == "")
		require.NotContains(t, answer.body, scopeOf("acme"))
	}
}

// requireSuccess runs the program and returns its output.
func requireSuccess(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	printed, err := cmd.CombinedOutput()
	out := string(printed)
	require.NoError(t, err, out)
	require.NotContains(t, out, "FAILED")
	for _, line := range []string{
		`same operation, status: 200`,
		`its answer is the first one: \{"row":1,`,
		`same operation with another file, status: 422`,
		`same token for another operation, status: 403`,
		`the reason, for the server alone: used`,
		`1000 are left of the hour's, and the next upload has one more`,
		`"detail":"the account's plan has no room for it now","code":"budget_exceeded","retry_after_seconds":3\d\d\d`,
		`uses left of its token: 1`,
		`10 answers with status 201`,
		`54 answers with status 429`,
		`tokens still unspent: 54`,
		`end of the process that ran the command: signal: killed`,
		`Do found out by itself: replayed: true`,
		`runs of the command's function: 1`,
		`differences: 0`,
		`all \d+ checks held`,
	} {
		require.Regexp(t, regexp.MustCompile(`(?m)`+line), out)
	}
	return out
}

// serverWithPlainRole returns a server's connection string as its superuser, and as a role that may only create
// databases. With DATABASE_URL both are that.
func serverWithPlainRole(t *testing.T) (admin, role string) {
	t.Helper()
	server, err := pgserver.Start(t.Context(), pgserver.Options{TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	admin = server.ConnString()
	if !server.Owned() {
		return admin, admin
	}
	conn, err := pgx.Connect(t.Context(), admin)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `create role plain login createdb password 'plain'`)
	require.NoError(t, err)
	u, err := url.Parse(admin)
	require.NoError(t, err)
	u.User = url.UserPassword("plain", "plain")
	return admin, u.String()
}

// databases are those that a run of the program left behind. On a server of one's own those of other runs count too.
func databases(t *testing.T, connString string) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), connString)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), `select datname::text from pg_database where datname like 'metered\_quickstart\_%'`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

func TestRefuse_AnUnreachableDatabaseMaySucceedLater(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nowhere")
	require.NoError(t, err)
	defer pool.Close()
	a, err := newApp(pool, nil)
	require.NoError(t, err)
	_, err = metered.Do[any](t.Context(), a.metered, metered.Command{ID: "op"}, nil)
	w := httptest.NewRecorder()
	refuse(w, "op", err)
	require.Equal(t, http.StatusServiceUnavailable, w.Code, err)
	require.Contains(t, w.Body.String(), "repeat the request with the same Idempotency-Key")
	w = httptest.NewRecorder()
	refuse(w, "op", errors.New("another"))
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.NotContains(t, w.Body.String(), "another")
}
