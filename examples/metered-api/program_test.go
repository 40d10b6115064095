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
func TestMeteredAPI(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "metered-api")
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
		`"state":"done","factors":[71,839,1471,6857],"units_held":0,"units_charged":1}`,
		`"state":"done","factors":[1000000000039],"units_held":0,"units_charged":500}`,
		`"state":"failed","units_held":0,"units_charged":0}`,
		`"violated-policies":["hourly"]`,
		"charged: 501, held: 0; verified",
		": 0 differences",
	} {
		require.Contains(t, string(printed), line)
	}
	require.Error(t, program("-worker").Run())

	serving := program("-listen", "127.0.0.1:0")
	stdout, err := serving.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, serving.Start())
	lines := bufio.NewScanner(stdout)
	base := ""
	for base == "" && lines.Scan() {
		_, base, _ = strings.Cut(lines.Text(), "curl -i ")
	}
	base, _, _ = strings.Cut(base, "/tasks")
	ann := client{base, "key-of-ann"}
	done, err := ann.await(t.Context(), ann.submit(t.Context(), "", 91).ID)
	require.NoError(t, err)
	require.Equal(t, []int64{7, 13}, done.Factors)
	require.NoError(t, serving.Process.Signal(os.Interrupt))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.NoError(t, serving.Wait())

	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_database where datname like 'metered\_api\_%'`).Scan(&left))
	require.Zero(t, left, "databases left behind")
}
