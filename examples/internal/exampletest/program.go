// Package exampletest builds and runs an example as a user would.
package exampletest

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

// Program is an example on a server of its own.
type Program struct {
	t      *testing.T
	binary string
	server *pgserver.Server
}

// Build builds the example of the test's directory.
func Build(t *testing.T) *Program {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "example")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	server, err := pgserver.Start(t.Context(), pgserver.Options{TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	return &Program{t, binary, server}
}

// Command is one run of it.
func (p *Program) Command(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // the machine may be busy
	p.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, p.binary, args...)
	cmd.Dir = p.t.TempDir() // not that of the repository
	cmd.Env = append(os.Environ(), "DATABASE_URL="+p.server.ConnString())
	return cmd
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
	serving := p.Command("-listen", "127.0.0.1:0")
	stdout, err := serving.StdoutPipe()
	require.NoError(p.t, err)
	require.NoError(p.t, serving.Start())
	lines := bufio.NewScanner(stdout)
	base := ""
	for base == "" && lines.Scan() {
		_, base, _ = strings.Cut(lines.Text(), before)
	}
	base, _, _ = strings.Cut(base, after)
	f(base)
	require.NoError(p.t, serving.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(p.t, err)
	require.NoError(p.t, serving.Wait())
}

// LeavesNoDatabase checks that no database with a name like the pattern is left.
func (p *Program) LeavesNoDatabase(like string) {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.server.ConnString())
	require.NoError(p.t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(p.t, conn.QueryRow(p.t.Context(), `select count(*) from pg_database where datname like $1`, like).Scan(&left))
	require.Zero(p.t, left, "databases left behind")
}
