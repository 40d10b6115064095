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
)

func (a *app) sweepCmd() *cobra.Command {
	var opts holds.SweepOptions
	var cfg holds.Config
	c := &cobra.Command{
		Use:   "sweep",
		Short: "Record and announce what ended by time: holds and leases",
		Long: `Sweep ends the holds whose time is over and settles the leases that have ended. The units of such holds are free
already; those of a lease only then.

A hold is announced once, by whoever sweeps. This command calls no subscribers (holds.Config.Subscribers): where the
application has some, let the application sweep. With --notify those who listen (holds.Book.Listen) hear of it.

Any number may run at once. Each batch is a transaction of its own.`,
		Example: `  metered sweep
  metered sweep --notify --batch 100`,
	}
	flags := c.Flags()
	flags.IntVar(&opts.Batch, "batch", holds.DefaultSweepBatch, "end so many holds in one transaction")
	flags.IntVar(&opts.Max, "max", 0, "stop after so many batches; 0 is all")
	flags.BoolVar(&cfg.Notify, "notify", false, "tell those who listen, as holds.Config.Notify does")
	flags.BoolVar(&cfg.NotifyContent, "notify-content", false, "tell those who listen all of it, as holds.Config.NotifyContent does")
	return a.does(c, needApplication, func(ctx context.Context, _ []string) error {
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			return a.sweep(ctx, pool, cfg, opts)
		}, "sweep_holds", "settle_lease")
	})
}

func (a *app) sweep(ctx context.Context, pool *pgxpool.Pool, cfg holds.Config, opts holds.SweepOptions) error {
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
	var settled leases.SettleReport
	if err == nil {
		settled, err = a.settle(ctx, pool)
	}
	if a.json {
		return cmp.Or(a.print(map[string]any{"holds": swept, "leases": settled}), err)
	}
	t := a.table("WHAT", "DONE", "LEFT FOR LATER")
	t.row("holds", swept.Expired, swept.Skipped+swept.Failed)
	t.row("leases", settled.Settled, settled.Busy+settled.Held)
	if flushed := t.flush(); flushed != nil {
		return flushed
	}
	if err != nil {
		return fmt.Errorf("after what is above: %w", err)
	}
	return nil
}

// leasePool is a Pool that leases nothing.
func (a *app) leasePool(pool *pgxpool.Pool) (*leases.Pool, error) {
	return leases.New(pool, leases.Config{Ledger: budget.Config{Schema: a.schema}, Rules: []leases.Rule{{}}, NoRecall: true})
}

func (a *app) settle(ctx context.Context, pool *pgxpool.Pool) (leases.SettleReport, error) {
	p, err := a.leasePool(pool)
	if err != nil {
		return leases.SettleReport{}, err
	}
	defer p.Close(ctx)
	return p.Settle(ctx)
}
