package holds_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// With glibc's malloc as it starts out, a place or transition gives memory back to the
// kernel and asks for it again up to four times, which each time has to clear it: 15 to 19
// percent of its time. See docs/adr/0020-statements.md.
func TestMemory_CallsTakeNoneFromTheKernel(t *testing.T) {
	t.Parallel()
	f := on(t, pgtest.Open(t), holds.Config{}, nil)                                            // with the real clock, which it is about
	f.mustPlace(holds.Request{TTL: time.Minute, Lines: []holds.Line{capacity("first", 1, 1)}}) // what comes once, comes elsewhere
	f.pool.Reset()
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	cycle := func(i int) {
		var h [2]holds.Hold
		for n := range h {
			r := holds.Request{TTL: time.Minute, Lines: []holds.Line{capacity(fmt.Sprint("a", i%100), 1, 1_000_000)}}
			require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) (err error) {
				h[n], err = f.book.Place(t.Context(), tx, r)
				return err
			}))
		}
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{h[0].ID}, All: true})
			return err
		}))
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := f.book.Release(t.Context(), tx, holds.Release{IDs: []string{h[1].ID}})
			return err
		}))
	}
	for i := range 200 {
		cycle(i)
	}
	before := pageFaults(t, conn)
	for i := range 500 {
		cycle(i)
	}
	faults := float64(pageFaults(t, conn)-before) / (4 * 500)
	t.Logf("%.2f page faults a call", faults)
	require.Less(t, faults, 5.0)
}

// pageFaults is how many pages the backend of a connection has got from the kernel without
// reading them from disk.
func pageFaults(t *testing.T, conn *pgxpool.Conn) int {
	t.Helper()
	var pid int
	var local bool
	require.NoError(t, conn.QueryRow(t.Context(), `select pg_backend_pid(), inet_server_addr() is null`).Scan(&pid, &local))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if !local || err != nil || !strings.Contains(string(stat), "postgres") {
		t.Skip("the backend is not a process that can be looked at here")
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil || strings.Contains(string(maps), "musl") {
		t.Skip("the server's malloc is not glibc's")
	}
	n, err := strconv.Atoi(strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[7])
	require.NoError(t, err)
	return n
}
