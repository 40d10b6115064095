package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

// The program is built and run as a user would.
func TestBilling(t *testing.T) {
	t.Parallel()
	binary := filepath.Join(t.TempDir(), "billing")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	server, err := pgserver.Start(t.Context(), pgserver.Options{TCP: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // the machine may be busy
	defer cancel()
	cmd := exec.CommandContext(ctx, binary)
	cmd.Dir = t.TempDir() // not that of the repository
	cmd.Env = append(os.Environ(), "DATABASE_URL="+server.ConnString())
	printed, err := cmd.Output()
	require.NoError(t, err, string(printed))
	for _, line := range []string{
		`order-1, a tea: refused: it costs 12\.00, and there is 0\.00\.`,
		`payment-1 of 80\.00: replayed: true`,
		`order-1, a tea: shipped, 12\.00 debited`,
		`order-2, a tea: refused: there is no address to ship to`,
		`order-4, a tea: 12\.00 debited, replayed: true`,
		`shipped: 6, refused: 14`,
		`order-5, a cup: refused: it costs 4\.00, and 2\.00 of the day's 50\.00 are left; it fits in 2\dh\d+m0s\.`,
		`cancel order-4: done`,
		`cancel order-4: refused: no such order, or it was cancelled before`,
		` +1 .* payment-1 +top-up +80\.00 +80\.00`,
		` +10 .* order-4 +cancelled: tea +12\.00 +44\.00`,
		` +11 .* order-6 +tea +12\.00 +32\.00`,
		`verified 11 entries of 1 scopes: 0 differences`,
		`8 orders of 48\.00, 8 shipments, 48\.00 debited`,
	} {
		require.Regexp(t, regexp.MustCompile(`(?m)^`+line+`$`), string(printed))
	}

	conn, err := pgx.Connect(t.Context(), server.ConnString())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var left int
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from pg_database where datname like 'metered\_billing\_%'`).Scan(&left))
	require.Zero(t, left, "databases left behind")
}
