package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

func (a *app) seriesCmd() *cobra.Command {
	var from, to, by, zone string
	c := &cobra.Command{
		Use:   "series SCOPE",
		Short: "Show the usage of a scope by hour, day, week, month or year",
		Long: `Series cuts a period into hours, days, weeks, months, or parts of a fixed length, by the clock of a time zone, and shows
the scope's usage in each. Billed is charges less their refunds until now. Used is charges less the refunds made in that
time. It takes a few look-ups for each part, for any number of entries.

If entries of the period were purged, it fails, instead of counting too little.`,
		Example: `  metered series org/acme --from 2026-11-01 --to 2026-12-01 --by day --timezone Europe/Berlin
  metered series org/acme --by hour --json`,
		Args: cobra.ExactArgs(1),
	}
	flags := c.Flags()
	flags.StringVar(&from, "from", "", "the first time of the period; defaults to 30 parts before its end")
	flags.StringVar(&to, "to", "", "the first time that is no longer part of it; defaults to now")
	flags.StringVar(&by, "by", "day", "hour, day, week, month, year, or a duration such as 15m")
	flags.StringVar(&zone, "timezone", "UTC", "the time zone, as in Europe/Berlin")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		place, err := time.LoadLocation(zone)
		if err != nil {
			return usagef("--timezone: %v", err)
		}
		unit := budget.Unit(by)
		switch unit {
		case budget.Hour, budget.Day, budget.Week, budget.Month, budget.Year:
		default:
			if d, err := time.ParseDuration(by); err != nil || d <= 0 || d%time.Microsecond != 0 {
				return usagef("--by: %q is neither hour, day, week, month, year nor a duration such as 15m", by)
			}
		}
		begin, err := optionalTime("--from", from, place)
		if err != nil {
			return err
		}
		end, err := optionalTime("--to", to, place)
		if err != nil {
			return err
		}
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			if err := a.known(ctx, tx, args[0]); err != nil {
				return err
			}
			if end.IsZero() {
				if err := tx.QueryRow(ctx,
					"select pg_catalog.to_json(pg_catalog.clock_timestamp())").Scan(&end); err != nil {
					return err
				}
			}
			if begin.IsZero() {
				begin = before(end.In(place), unit)
			}
			all, err := ledger.Series(ctx, tx, args[0], begin, end, unit, place)
			if err != nil {
				return err
			}
			return a.printSeries(all, place)
		})
	})
}

func (a *app) printSeries(all []budget.RangeUsage, place *time.Location) error {
	t := a.table("FROM", "CHARGES", "CHARGED", "REFUNDED OF IT", "BILLED", "REFUNDS MADE", "USED", "CREDITED",
		"UNSETTLED")
	for _, u := range all {
		if a.json {
			if err := a.print(ranged(u)); err != nil {
				return err
			}
			continue
		}
		t.row(u.From.In(place).Format("2006-01-02 15:04:05 MST"), u.Charges, u.Charged, u.RefundedOfCharged,
			u.Billed(), u.RefundsMade, u.Used(), u.Credited, u.Unsettled)
	}
	return t.flush()
}

func optionalTime(flag, text string, in *time.Location) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	t, err := parseTime(text, in)
	if err != nil {
		return t, usagef("%s: %v", flag, err)
	}
	return t, nil
}

// before is where a period of 30 parts begins, the part that end is in included.
func before(end time.Time, unit budget.Unit) time.Time {
	const parts = 29
	y, m, d := end.Date()
	switch unit {
	case budget.Hour:
		return end.Truncate(time.Hour).Add(-parts * time.Hour)
	case budget.Day:
		return time.Date(y, m, d-parts, 0, 0, 0, 0, end.Location())
	case budget.Week:
		return time.Date(y, m, d-parts*7-(int(end.Weekday())+6)%7, 0, 0, 0, 0, end.Location())
	case budget.Month:
		return time.Date(y, m-parts, 1, 0, 0, 0, 0, end.Location())
	case budget.Year:
		return time.Date(y-parts, 1, 1, 0, 0, 0, 0, end.Location())
	}
	length, _ := time.ParseDuration(string(unit))
	return end.Add(-(parts + 1) * length)
}
