package main

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

// The program is built and run as a user would.
func TestSignup(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "signup")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	server, err := pgserver.Start(t.Context(), pgserver.Options{TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	program := func(args ...string) *exec.Cmd {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // the machine may be busy
		t.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, binary, args...)
		cmd.Dir = t.TempDir() // not that of the repository
		cmd.Env = append(os.Environ(), "DATABASE_URL="+server.ConnString())
		return cmd
	}

	printed, err := program().Output()
	require.NoError(t, err, string(printed))
	for _, line := range []string{
		`409 {"error":"somebody is signing up with this address"}`,
		`404 {"error":"no such claim"}`,
		`201 {"id":1,"email":"ann@example.com","name":"Ann"}`,
		`409 {"error":"there is an account with this address"}`,
		`410 {"error":"the claim has ended: claim the address again"}`,
		"status and how many: map[201:1 409:19]",
	} {
		require.Contains(t, string(printed), line)
	}

	serving := program("-listen", "127.0.0.1:0")
	stdout, err := serving.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, serving.Start())
	lines := bufio.NewScanner(stdout)
	base := ""
	for base == "" && lines.Scan() {
		_, base, _ = strings.Cut(lines.Text(), "-b jar ")
	}
	base, _, _ = strings.Cut(base, "/claims")
	a := newBrowser(base).do(t.Context(), "POST", "/claims", email("ann@example.com"))
	require.Equal(t, 201, a.Status)
	require.Contains(t, a.Body, `"expires_in_seconds":900`)
	require.NoError(t, serving.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.NoError(t, serving.Wait())

	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_database where datname like 'metered\_signup\_%'`).Scan(&left))
	require.Zero(t, left, "databases left behind")
}
