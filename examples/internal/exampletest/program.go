// Package exampletest runs an example as a user would.
package exampletest

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// asExample is the environment variable that has a test binary run its example.
const asExample = "METERED_TEST_EXAMPLE"

// Main is the TestMain of an example, whose tests start their own binary as the example: it is linked once.
func Main(m *testing.M, example func()) {
	if os.Getenv(asExample) == "" {
		m.Run()
	} else {
		example()
	}
}

// Start starts the example on a database, and waits for the line of its output that has a text, and returns the rest of
// that line. The rest of the output goes nowhere.
func Start(t *testing.T, databaseURL, text string, args ...string) (rest string, cmd *exec.Cmd) {
	t.Helper()
	cmd = command(t, databaseURL, args...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(stdout)
	for found := false; !found; {
		require.True(t, lines.Scan(), "it does not print %q", text)
		_, rest, found = strings.Cut(lines.Text(), text)
	}
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return rest, cmd
}

// Open is a database that has the example's own tables.
func Open(t *testing.T, sql string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), sql)
	require.NoError(t, err)
	return pool
}

// Serve serves until the end of the test.
func Serve(t *testing.T, handler http.Handler) (base string) {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func command(t *testing.T, databaseURL string, args ...string) *exec.Cmd {
	binary, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute) // the machine may be busy
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = t.TempDir() // not that of the repository
	cmd.Env = append(os.Environ(), asExample+"=1", "DATABASE_URL="+databaseURL)
	return cmd
}

// Program is an example that makes a database on the server of the tests.
type Program struct {
	t   *testing.T
	url string
}

// New has no run yet. At the end of the test no database of the example is left.
func New(t *testing.T) *Program {
	t.Helper()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	dir, err := os.Getwd()
	require.NoError(t, err)
	t.Cleanup(func() {
		left := pgtest.Value[int](t, pool, `select count(*) from pg_database where starts_with(datname, $1)`, "metered_"+filepath.Base(dir)+"_")
		require.Zero(t, left, "databases left behind")
	})
	return &Program{t, pgtest.ConnString(pool)}
}

// Command is one run of it.
func (p *Program) Command(args ...string) *exec.Cmd {
	return command(p.t, p.url, args...)
}

// Prints runs it, and checks that the output of the run, which must succeed, has the texts.
func (p *Program) Prints(texts ...string) {
	p.t.Helper()
	printed := p.Output()
	for _, text := range texts {
		require.Contains(p.t, printed, text)
	}
}

// Output runs it, and returns the output of a run that must succeed.
func (p *Program) Output(args ...string) string {
	p.t.Helper()
	printed, err := p.Command(args...).Output()
	require.NoError(p.t, err, string(printed))
	return string(printed)
}

// Serve runs it as a server, calls f with the address that it prints between two texts, and interrupts it. It must
// then report success.
func (p *Program) Serve(before, after string, f func(base string)) {
	p.t.Helper()
	rest, serving := Start(p.t, p.url, before, "-listen", "127.0.0.1:0")
	base, _, _ := strings.Cut(rest, after)
	f(base)
	require.NoError(p.t, serving.Process.Signal(os.Interrupt))
	require.NoError(p.t, serving.Wait())
}
