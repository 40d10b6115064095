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
func TestRatelimit(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "ratelimit")
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
		`RateLimit: "hourly";r=9;t=3600, "daily";r=29;t=86400`,
		`RateLimit: "hourly";r=8;t=3600, "daily";r=28;t=86400`,
		"admitted: 8, refused: 22",
		"admitted: 15, refused: 25",
		`"violated-policies":["all-hourly"]`,
		"admitted: 12, refused: 0",
		"would have been refused by hourly: 2, by all-hourly: 12",
		" 0 differences",
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
		_, base, _ = strings.Cut(lines.Text(), "curl -i ")
	}
	base, _, _ = strings.Cut(base, "/redeem")
	a, err := ask(t.Context(), base, "192.0.2.1", "SUMMER", "")
	require.NoError(t, err)
	require.Equal(t, `{"cents":1000}`, a.body)
	require.NoError(t, serving.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.NoError(t, serving.Wait())

	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_database where datname like 'metered\_ratelimit\_%'`).Scan(&left))
	require.Zero(t, left, "databases left behind")
}
