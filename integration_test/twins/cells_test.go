package twins

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// inCell makes calls of a twin go to a schema. What it reports is heard.
func (w *twins) inCell(tw *twin, in string) {
	var err error
	tw.ledger, err = budget.New(budget.Config{Schema: in, LockTimeout: time.Minute, OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		tw.heard = append(tw.heard, c)
		return nil
	}})
	require.NoError(w, err)
	tw.holds, err = holds.New(tw.ledger, holds.Config{MaxTTL: 365 * day, MaxLifetime: 365 * day})
	require.NoError(w, err)
	tw.carver, err = leases.NewCarver(tw.ledger)
	require.NoError(w, err)
	tw.book, err = wallet.New(tw.ledger, w.cfg)
	require.NoError(w, err)
	tw.schema, err = schema.Parse(in)
	require.NoError(w, err)
}

// twinCells are the two cells between which a twin moves.
type twinCells struct {
	router  *cells.Router
	schemas []string
	at      int
}

// settles gives a twin a second cell, whose numbers begin anew. Its wallet is in the first one.
func (w *twins) settles(tw *twin) {
	c := &twinCells{schemas: []string{"metered", "beside"}}
	_, err := metered.Migrate(w.Context(), tw.pool, metered.MigrateOptions{Schema: c.schemas[1]})
	require.NoError(w, err)
	tw.clock = pgtest.SetClock(w.T, tw.pool, w.now)
	var clients []*metered.Client
	for _, name := range c.schemas {
		client, err := metered.New(tw.pool, metered.Config{Config: budget.Config{Schema: name}})
		require.NoError(w, err)
		clients = append(clients, client)
	}
	c.router, err = cells.New(clients)
	require.NoError(w, err)
	require.NoError(w, c.router.SetUp(w.Context()))
	tw.cells = c
	w.move(tw, 0)
}

// move moves a twin to a cell.
func (w *twins) move(tw *twin, to int) {
	err := tw.cells.router.Move(w.Context(), cells.Move{Tenant: "ann", To: to, LockTimeout: time.Minute})
	require.NoError(w, err)
	tw.cells.at = to
	w.inCell(tw, tw.cells.schemas[to])
}

// key is a threshold of the wallet in the ledger.
func key(c budget.Threshold) string { return "l/credit/" + c.Name }

// heardIn takes what a twin has reported in a call or a sweep that has committed: each report is of a level that was
// reached, and is remembered, and whatever is newly remembered was reported.
func (w *twins) heardIn(tw *twin, what string) {
	told := map[string]int{}
	for _, c := range tw.heard {
		if c.Available > c.Threshold.Left {
			panic(difference(fmt.Sprintf("%s: twin %d reports %s with %d left", what, tw.no, c.Threshold.Name, c.Available)))
		}
		told[key(c.Threshold)]++
	}
	heard := tw.heard
	tw.heard = nil
	if len(w.cfg.Thresholds) == 0 {
		return
	}
	remembered := w.remembered(tw)
	for _, c := range w.cfg.Thresholds {
		name := key(c)
		before, now := slices.Contains(tw.remembers, name), slices.Contains(remembered, name)
		if n := told[name]; n > 1 || n == 1 && !now || n == 0 && now && !before {
			panic(difference(fmt.Sprintf("%s: twin %d reported %s %d times, and remembers it: %v, before: %v (%+v)", what, tw.no, name, n, now, before, heard)))
		}
	}
	tw.remembers = remembered
}

func (w *twins) remembered(tw *twin) (keys []string) {
	sql := tw.schema.SQL(`select coalesce(array(select jsonb_object_keys(e.crossed)), '{}') from metered.ledger e where e.scope = 'ann' order by e.seq desc limit 1`)
	if err := tw.pool.QueryRow(w.Context(), sql).Scan(&keys); err != nil {
		require.ErrorIs(w, err, pgx.ErrNoRows)
	}
	return keys
}

// armed checks what each twin remembers as reported, after a call that reports, and that has written an entry: a level
// that is reached, and none from which the balance is far away. In between that depends on the past.
func (w *twins) armed(what string) {
	if len(w.cfg.Thresholds) == 0 {
		return
	}
	w.look()
	left := w.last.Units + w.cfg.Overdraft
	for _, c := range w.cfg.Thresholds {
		if left > c.Left && left < c.Left+c.Rearm {
			continue
		}
		for _, tw := range w.all {
			if slices.Contains(tw.remembers, key(c)) != (left <= c.Left) {
				panic(difference(fmt.Sprintf("%s: %d are left, and twin %d has as reported: %v", what, left, tw.no, tw.remembers)))
			}
		}
	}
}
