package main

import (
	"bufio"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

func (a *app) repairClockCmd() *cobra.Command {
	var tolerance days
	var yes bool
	note := budget.Note{Actor: "metered repair-clock"}
	c := &cobra.Command{
		Use:   "repair-clock [SCOPE]",
		Short: "Unblock scopes with a last entry ahead of the clock",
		Long: `Repair-clock finds every scope, or the one named, whose last entry is ahead of the database's clock by more than the
tolerance: their windowed charges fail (budget_clock). It shows them, asks, and then appends to each an entry with the
clock's time. No entry is changed. Entries that were dated into the future leave a window late, never early.

Make sure first that the database's clock is right. Each scope is repaired in a transaction of its own; those that were
repaired before an interruption stay so.`,
		Example: `  metered repair-clock
  metered repair-clock --yes --reason "failover of 2026-11-23"`,
		Args: cobra.MaximumNArgs(1),
	}
	flags := c.Flags()
	flags.Var(&tolerance, "tolerance", "how far ahead an entry may be; defaults to 1m, as with charges")
	flags.BoolVarP(&yes, "yes", "y", false, "do not ask")
	flags.StringVar(&note.Actor, "actor", note.Actor, "who does it, for the entry's note")
	flags.StringVar(&note.Reason, "reason", "", "why, for the entry's note")
	return a.does(c, needMaintenance, func(ctx context.Context, args []string) error {
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			ledger, err := budget.New(budget.Config{Schema: a.schema})
			if err != nil {
				return err
			}
			ahead, err := scopesAhead(ctx, pool, ledger, time.Duration(tolerance), args)
			if err != nil {
				return err
			}
			return a.repair(ctx, pool, ledger, ahead, note, yes)
		}, "repair_clock")
	})
}

func scopesAhead(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	tolerance time.Duration, only []string) (all []budget.ClockState, err error) {
	err = readOnly(ctx, pool, func(tx pgx.Tx) error {
		for s, err := range ledger.ClockAhead(ctx, tx, tolerance) {
			if err != nil {
				return err
			}
			if len(only) == 0 || s.Scope == only[0] {
				all = append(all, s)
			}
		}
		return nil
	})
	return all, err
}

func (a *app) repair(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	ahead []budget.ClockState, note budget.Note, yes bool) error {
	if len(ahead) == 0 {
		if !a.json {
			fmt.Fprintln(a.out, "No scope is ahead of the clock.")
		}
		return nil
	}
	if !yes {
		t := newTable(a.err, "SCOPE", "ENTRY", "AT", "AHEAD")
		for _, s := range ahead {
			t.row(s.Scope, s.Seq, s.At, s.Ahead)
		}
		if err := t.flush(); err != nil {
			return err
		}
		now := ahead[0].At.Add(-ahead[0].Ahead)
		if !a.confirm(ctx, fmt.Sprintf("The database's clock says %s. Repair %s?", instant(now),
			these(len(ahead)))) {
			return errRefused
		}
	}
	t := a.table("SCOPE", "ENTRY", "AT", "WAS AHEAD")
	defer t.flush()
	for _, s := range ahead {
		var r budget.ClockState
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			r, err = ledger.RepairClock(ctx, tx, s.Scope, note)
			return err
		})
		switch {
		case err != nil:
			return fmt.Errorf("scope %s: %w", shown(s.Scope), err)
		case a.json:
			if err := a.print(struct {
				Scope string `json:"scope"`
				repaired
			}{s.Scope, repaired{r.Repaired, r.Seq, r.At, r.Ahead.Microseconds()}}); err != nil {
				return err
			}
		case r.Repaired:
			t.row(s.Scope, r.Seq, r.At, r.Ahead)
		default:
			t.row(s.Scope, "-", "-", "no more")
		}
	}
	return nil
}

// repaired is a budget.ClockState beside the name of its scope.
type repaired struct {
	Repaired bool      `json:"repaired"`
	Seq      int64     `json:"seq"`
	At       time.Time `json:"at"`
	AheadUS  int64     `json:"ahead_us"`
}

// confirm asks, and waits for an answer or for the end of ctx.
func (a *app) confirm(ctx context.Context, question string) bool {
	fmt.Fprintf(a.err, "%s [y/N] ", question)
	answer := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case said := <-answer:
		return said == "y" || said == "yes"
	case <-ctx.Done():
		fmt.Fprintln(a.err)
		return false
	}
}

func these(n int) string {
	if n == 1 {
		return "this scope"
	}
	return fmt.Sprintf("these %d scopes", n)
}
