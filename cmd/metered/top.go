package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/inspect"
)

// topFlags select the content of top.
type topFlags struct {
	interval, within days
	rows, count      int
}

func (a *app) topCmd() *cobra.Command {
	f := topFlags{interval: days(2 * time.Second), within: days(time.Minute), rows: 10}
	c := &cobra.Command{
		Use:   "top",
		Short: "Show hot scopes, live",
		Long: `Top shows the hottest scopes, by their recent entries and by the waiters for their locks, refusals by limit, open and
overdue holds, leases, and operations in flight. On a terminal it redraws in place, until Ctrl-C. Elsewhere it prints
again each time.

The database has only refusals of commands with RecordRefusal: all others leave nothing behind. The observer counts them
in the application.`,
		Example: `  metered top
  metered top --interval 5s --within 10m
  metered top --count 1 --json`,
	}
	flags := c.Flags()
	flags.Var(&f.interval, "interval", "how often it is read anew")
	flags.Var(&f.within, "within", "how far back it counts, 1s to 24h")
	flags.IntVarP(&f.rows, "rows", "n", f.rows, "how many scopes and refusals it shows")
	flags.IntVar(&f.count, "count", 0, "end after so many times; 0 is never")
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		switch {
		case f.rows < 1:
			return usagef("--rows: %d is not 1 or more", f.rows)
		case time.Duration(f.interval) < 100*time.Millisecond:
			return usagef("--interval: %s is less than 100ms", f.interval.String())
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error { return a.top(ctx, pool, f) })
	})
}

// topView is the content of top at one time.
type topView struct {
	Overview inspect.Overview    `json:"overview"`
	Hot      inspect.HotList     `json:"hot"`
	Refusals inspect.RefusalList `json:"refusals"`
}

func (a *app) top(ctx context.Context, pool *pgxpool.Pool, f topFlags) error {
	screen := a.newScreen()
	defer screen.close()
	tick := time.NewTicker(time.Duration(f.interval))
	defer tick.Stop()
	for n := 1; ; n++ {
		v, err := a.topView(ctx, pool, f)
		switch {
		case ctx.Err() != nil:
			return found(exitDone) // that is how it ends
		case err != nil && (n == 1 || !metered.Retryable(err)):
			return err
		case err != nil:
			fmt.Fprintf(screen, "%v\n", err)
		case a.json:
			err = a.print(v)
		default:
			v.draw(screen)
		}
		if err := cmp.Or(err, screen.show()); err != nil && !metered.Retryable(err) {
			return err
		}
		if n == f.count {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return found(exitDone)
		}
	}
}

func (a *app) topView(ctx context.Context, pool *pgxpool.Pool, f topFlags) (v topView, err error) {
	err = readOnly(ctx, pool, func(tx pgx.Tx) error {
		r, err := inspect.New(tx, a.schema)
		if err != nil {
			return err
		}
		if v.Overview, err = r.Overview(ctx); err != nil {
			return err
		}
		if v.Hot, err = r.Hot(ctx, time.Duration(f.within), f.rows); err != nil {
			return err
		}
		v.Refusals, err = r.Refusals(ctx, time.Duration(f.within), f.rows)
		return err
	})
	return v, err
}

func (v topView) draw(w *screen) {
	o := v.Overview
	fmt.Fprintf(w, "%s   %s entries in %s scopes   %s operations on record\n", instant(o.Now),
		counted(o.Entries), counted(o.Scopes), counted(o.Operations))
	fmt.Fprintf(w, "in flight %d, waiting %d   holds open %s, unswept %s", o.InFlight, o.Waiting,
		counted(o.OpenHolds), counted(o.Unswept))
	switch {
	case !o.OldestDue.IsZero():
		fmt.Fprintf(w, ", oldest due %s ago", lasting(o.SweepLag.Round(time.Second)))
	case !o.NextDue.IsZero():
		fmt.Fprintf(w, ", next due in %s", lasting(max(0, o.NextDue.Sub(o.Now)).Round(time.Second)))
	}
	fmt.Fprintf(w, "   leases out %s with %d units, ended and not settled %s\n",
		counted(o.LeasesOut), o.UnitsOut, counted(o.LeasesEnded))
	if o.LotsDue.N > 0 {
		fmt.Fprintf(w, "lots of wallets ended and not swept %s, the oldest %s ago\n",
			counted(o.LotsDue), lasting(o.LotLag.Round(time.Second)))
	}
	if o.ClockAhead > 0 {
		fmt.Fprintf(w, "entries are ahead of the clock by %s: see metered repair-clock\n",
			lasting(o.ClockAhead))
	}
	fmt.Fprintln(w)
	t := newTable(w, "SCOPE", "ENTRIES/S", "UNITS/S", "WAITING", "LONGEST WAIT", "LAST ENTRY")
	for _, h := range v.Hot.Scopes {
		scope := h.Scope
		if scope == "" {
			scope = "(another lock)"
		}
		t.row(scope, fmt.Sprintf("%.1f", h.PerSec), fmt.Sprintf("%.1f", h.UnitsPS), h.Waiting,
			h.Longest.Round(time.Millisecond), h.Last)
	}
	_ = t.flush()
	if len(v.Refusals.Refusals) == 0 {
		return
	}
	fmt.Fprintln(w)
	t = newTable(w, "REFUSED BY", "SCOPE", "LIMIT", "COMMAND", "REFUSALS/S", "LAST")
	for _, d := range v.Refusals.Refusals {
		t.row(d.Code, dash(d.Scope), dash(d.Limit), dash(d.Name),
			fmt.Sprintf("%.2f", float64(d.Count)/max(1, v.Refusals.Within.Seconds())), d.Last)
	}
	_ = t.flush()
}

func counted(c inspect.Count) string {
	switch c.Kind {
	case inspect.Estimated:
		return fmt.Sprintf("~%d", c.N)
	case inspect.AtLeast:
		return fmt.Sprintf("%d+", c.N)
	case inspect.Unknown:
		return "?"
	}
	return fmt.Sprint(c.N)
}

// screen is drawn as a whole: in place on a terminal, one after the other elsewhere.
type screen struct {
	bytes.Buffer
	a     *app
	live  bool
	shown int
}

const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
)

func (a *app) newScreen() *screen {
	_, _, live := terminal(a.out)
	s := &screen{a: a, live: live && !a.json}
	if s.live {
		fmt.Fprint(a.out, enterScreen)
	}
	return s
}

func (s *screen) close() {
	if s.live {
		fmt.Fprint(s.a.out, leaveScreen)
	}
}

func (s *screen) show() error {
	defer s.Reset()
	text := s.String()
	if text == "" {
		return nil
	}
	if s.live {
		width, height, _ := terminal(s.a.out)
		text = fitted(text, width, height)
	} else if s.shown++; s.shown > 1 {
		text = "\n" + text
	}
	_, err := fmt.Fprint(s.a.out, text)
	return err
}

// fitted is text cut to a terminal, with codes that redraw it in place.
func fitted(text string, width, height int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	for i, line := range lines {
		if cut := []rune(line); width > 0 && len(cut) > width {
			lines[i] = string(cut[:width])
		}
	}
	return "\x1b[H" + strings.Join(lines, "\x1b[K\n") + "\x1b[K\x1b[J"
}
