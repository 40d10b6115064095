package integration_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Figures of docs/scale.md: a command by one client through each node beside plain Postgres, and commands of two schemas on two workers against
// those of one, with commits of 2 ms. METERED_LONG=1 measures them.
func TestCitus_Figures(t *testing.T) {
	if os.Getenv("METERED_LONG") == "" {
		t.Skip("it compares times, and is measured alone: METERED_LONG=1")
	}
	const turns, callers = 150, 16
	fast := onCitus(t, citusCluster).migrated()
	plain, err := pgserver.Start(t.Context(), pgserver.Options{Private: true})
	require.NoError(t, err)
	defer plain.Stop()
	all := map[string]*metered.Client{"plain Postgres": open(t, plain.ConnString(), metered.Config{}).c}
	for node, pool := range fast.nodes {
		all[node] = pgtest.NewClient(t, pool, metered.Config{})
	}
	send := func(c *metered.Client, id string) {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id, Charges: []budget.Charge{{Scope: "s", Amount: 1}}}, nil)
		require.NoError(t, err)
	}
	times := map[string][]time.Duration{}
	for turn := range turns {
		for name, c := range all {
			begin := time.Now()
			send(c, fmt.Sprint(name, turn))
			times[name] = append(times[name], time.Since(begin))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(times)) {
		slices.Sort(times[name])
		t.Logf("a command, %s: %v", name, times[name][turns/2].Round(10*time.Microsecond))
	}

	c := onCitus(t, func() (*pgserver.Citus, error) {
		cluster, err := pgserver.StartCitus(context.Background(), pgserver.Options{Durable: true, Settings: map[string]string{"commit_delay": "2000", "commit_siblings": "0"}})
		if err == nil {
			t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
		}
		return cluster, err
	}).migrated()
	cells := []*metered.Client{pgtest.NewClient(t, c.nodes["home"], metered.Config{}), pgtest.NewClient(t, c.nodes["other"], metered.Config{Config: budget.Config{Schema: c.elsewhere("second")}})}
	// The rate of the commands of some cells, by as many callers in all.
	rate := func(turn int, cells ...*metered.Client) float64 {
		var sent atomic.Int64
		var wg sync.WaitGroup
		until := time.Now().Add(3 * time.Second)
		for i := range callers {
			wg.Go(func() {
				for n := 0; time.Now().Before(until); n++ {
					send(cells[i%len(cells)], fmt.Sprint(turn, len(cells), i, "-", n))
					sent.Add(1)
				}
			})
		}
		wg.Wait()
		return float64(sent.Load()) / 3
	}
	var ratios, ones, twos []float64
	for turn := range 7 {
		one, two := rate(turn, cells[0]), rate(turn, cells...)
		ones, twos, ratios = append(ones, one), append(twos, two), append(ratios, two/one)
	}
	slices.Sort(ratios)
	slices.Sort(ones)
	slices.Sort(twos)
	t.Logf("commands a second, one cell: %.0f, two: %.0f, ratio %.2f", ones[3], twos[3], ratios[3])
	require.Greater(t, ratios[3], 1.2)
}
