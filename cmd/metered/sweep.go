package main

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

func (a *app) sweepCmd() *cobra.Command {
	var opts holds.SweepOptions
	var cfg holds.Config
	var noLots bool
	c := &cobra.Command{
		Use:   "sweep",
		Short: "Record and announce holds, leases and lots of wallets that ended by time",
		Long: `Sweep ends the holds whose time is over, settles the leases that have ended, and ends the due lots of wallets, whose units
lapse or roll over. The units of such holds are free already, and nothing is drawn from such lots. Units of a lease come
free only then.

A hold, and the lapsed units of a lot, are announced once, by the sweep that ends them. This command calls no subscribers
(of holds.Config and wallet.Config, its Thresholds too). If the application has some, let the application sweep, or leave
lots out with --no-lots. With --notify listeners (holds.Book.Listen) hear of it.

Any number may run at once. Each batch is a transaction of its own.`,
		Example: `  metered sweep
  metered sweep --notify --batch 100`,
	}
	flags := c.Flags()
	flags.IntVar(&opts.Batch, "batch", 500,
		"end so many holds, and so many lots, in one transaction")
	flags.BoolVar(&noLots, "no-lots", false, "do not end lots of wallets")
	flags.IntVar(&opts.Max, "max", 0, "stop after so many batches; 0 is all")
	flags.BoolVar(&cfg.Notify, "notify", false,
		"tell those who listen, as holds.Config.Notify does")
	flags.BoolVar(&cfg.NotifyContent, "notify-content", false,
		"tell those who listen all of it, as holds.Config.NotifyContent does")
	return a.does(c, needApplication, func(ctx context.Context, _ []string) error {
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			return a.sweep(ctx, pool, cfg, opts, noLots)
		}, "sweep_due", "sweep_scope", "settle_lease", "sweep_wallets", "sweep_wallet")
	})
}

func (a *app) sweep(ctx context.Context, pool *pgxpool.Pool, cfg holds.Config,
	opts holds.SweepOptions, noLots bool) error {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	book, err := holds.New(ledger, cfg)
	if err != nil {
		return err
	}
	bar := a.progress("holds swept", -1)
	opts.Progress = func(r holds.SweepReport) { bar.at(int64(r.Expired)) }
	swept, err := book.Sweep(ctx, pool, opts)
	bar.end()
	var settled leases.SweepReport
	if err == nil {
		settled, err = leases.Sweep(ctx, pool, ledger)
	}
	var lots wallet.SweepReport
	if err == nil && !noLots {
		lots, err = a.expireLots(ctx, pool, ledger,
			wallet.SweepOptions{Batch: opts.Batch, Max: opts.Max})
	}
	if a.json {
		return cmp.Or(a.print(map[string]any{"holds": swept, "leases": settled, "lots": lots}), err)
	}
	t := a.table("WHAT", "DONE", "LEFT FOR LATER")
	t.row("holds", swept.Expired, swept.Skipped+swept.Failed)
	t.row("leases", settled.Settled, settled.Busy+settled.Held)
	if !noLots {
		t.row("lots", lots.Ended, lots.Busy+lots.Behind)
	}
	if flushed := t.flush(); flushed != nil {
		return flushed
	}
	if err != nil {
		return fmt.Errorf("after the work above: %w", err)
	}
	return nil
}

func (a *app) expireLots(ctx context.Context, pool *pgxpool.Pool, ledger *budget.Ledger,
	opts wallet.SweepOptions) (wallet.SweepReport, error) {
	book, err := wallet.New(ledger, wallet.Config{})
	if err != nil {
		return wallet.SweepReport{}, err
	}
	bar := a.progress("lots ended", -1)
	opts.Progress = func(r wallet.SweepReport) { bar.at(int64(r.Ended)) }
	defer bar.end()
	return book.Sweep(ctx, pool, opts)
}
