package maintain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// Report has the steps of a run.
type Report struct {
	// Steps are all nine steps, in the order in which they run.
	Steps []Step `json:"steps"`

	// After is the last scope that the purge of entries has done. It is "" once all scopes are
	// done.
	After string `json:"after,omitempty"`
}

// Step is one sweep or purge.
type Step struct {
	// Name says what the step does, such as "sweep holds".
	Name string `json:"name"`

	// Done are the rows that the step ended or deleted.
	Done int64 `json:"done"`

	// Left are the rows left for the next run, by the reason: "locked" by others, "subscriber"
	// whose Subscriber failed, "behind", which are scopes with many due holds, "held", which are
	// children with open holds, or "unread", which are the entries that the slowest consumer of the
	// feed has not consumed: a purge keeps them up to its patience.
	Left map[string]int64 `json:"left,omitempty"`

	// Off says why the step did not run. It is "" if it ran.
	Off string `json:"off,omitempty"`

	// Err says why the step failed. It is nil if it did not.
	Err error `json:"-"`
}

// Run sweeps holds, leases with carved children, and lots, and then purges.
//
// A step that fails stops no other: Run joins the errors, which name their steps. When ctx ends,
// finished batches stay, and the next run does the rest. Any number may run at once.
func Run(ctx context.Context, pool *pgxpool.Pool, parts Parts, policy Policy) (Report, error) {
	if err := fault.NotNil(errArgument, "pool", pool); err != nil {
		return Report{}, err
	}
	if err := policy.check(parts); err != nil {
		return Report{}, err
	}
	r := &run{Policy: policy, parts: parts, pool: pool}
	steps := r.steps()
	for _, s := range steps {
		off := s.off
		if off == "" {
			off = "the run ended before"
		}
		r.report.Steps = append(r.report.Steps, Step{Name: s.name, Off: off})
	}
	r.report.After = policy.After
	var all []error
	for i, s := range steps {
		if s.off != "" || ctx.Err() != nil {
			continue
		}
		r.at = &r.report.Steps[i]
		r.at.Off = ""
		if err := s.run(ctx); err != nil {
			r.at.Err = err
			all = append(all, fmt.Errorf("maintain: %s: %w", s.name, err))
		}
	}
	if err := ctx.Err(); err != nil && !errors.Is(errors.Join(all...), err) {
		all = append(all, fmt.Errorf("maintain: %w", err))
	}
	return r.report, errors.Join(all...)
}

// run is a run under way.
type run struct {
	Policy
	parts  Parts
	pool   *pgxpool.Pool
	report Report
	at     *Step // under way
}

// step is a call of a piece.
type step struct {
	name string
	off  string // why it is left out
	run  func(context.Context) error
}

func (r *run) steps() []step {
	swept := func(without bool, field string) string {
		switch {
		case r.NoSweeps:
			return "Policy.NoSweeps"
		case r.DryRun:
			return "Policy.DryRun"
		case without:
			return field + " is nil"
		}
		return ""
	}
	purged := func(age time.Duration, field string) string {
		switch {
		case r.NoPurges:
			return "Policy.NoPurges"
		case age == 0:
			return "Policy." + field + " is not set"
		case age == budget.Never:
			return "Policy." + field + " is budget.Never"
		}
		return ""
	}
	return []step{
		{"sweep holds", swept(r.parts.Holds == nil, "Parts.Holds"), r.sweepHolds},
		{"sweep leases", swept(false, ""), r.sweepLeases},
		{"sweep lots", swept(r.parts.Wallets == nil, "Parts.Wallets"), r.sweepLots},
		{"purge holds", purged(r.Holds, "Holds"), r.purge(purge.Holds, r.Holds)},
		{"purge leases", purged(r.Leases, "Leases"), r.purge(purge.Leases, r.Leases)},
		{"purge tokens", purged(r.Tokens, "Tokens"), r.purge(purge.Tokens, r.Tokens)},
		{"purge operations", purged(r.Operations, "Operations"), r.purge(purge.Operations, r.Operations)},
		{"purge job keys", purged(r.JobKeys, "JobKeys"), r.purge(purge.JobKeys, r.JobKeys)},
		{"purge entries", purged(r.Entries, "Entries"), r.purgeEntries},
	}
}

// done puts the work of the step so far into the report. left has reasons and counts.
func (r *run) done(n int64, left map[string]int) {
	r.at.Done, r.at.Left = n, nil
	for why, n := range left {
		if n > 0 {
			if r.at.Left == nil {
				r.at.Left = map[string]int64{}
			}
			r.at.Left[why] = int64(n)
		}
	}
}

// progress is done after a batch.
func (r *run) progress(n int64, left map[string]int) {
	r.done(n, left)
	if r.Progress != nil {
		report := r.report
		report.Steps = slices.Clone(report.Steps)
		r.Progress(report)
	}
}

func (r *run) sweepHolds(ctx context.Context) error {
	left := func(s holds.SweepReport) map[string]int {
		return map[string]int{"locked": s.Skipped, "subscriber": s.Failed, "behind": s.Behind}
	}
	s, err := r.parts.Holds.Sweep(ctx, r.pool,
		holds.SweepOptions{Batch: r.Batch, Progress: func(s holds.SweepReport) {
			r.progress(int64(s.Expired), left(s))
		}})
	r.done(int64(s.Expired), left(s))
	return err
}

func (r *run) sweepLeases(ctx context.Context) error {
	s, err := leases.Sweep(ctx, r.pool, r.parts.Ledger)
	r.progress(int64(s.Settled), map[string]int{"locked": s.Busy, "held": s.Held})
	return err
}

func (r *run) sweepLots(ctx context.Context) error {
	left := func(s wallet.SweepReport) map[string]int {
		return map[string]int{"locked": s.Busy, "subscriber": s.Failed, "behind": s.Behind}
	}
	s, err := r.parts.Wallets.Sweep(ctx, r.pool,
		wallet.SweepOptions{Batch: r.Batch, Progress: func(s wallet.SweepReport) {
			r.progress(int64(s.Ended), left(s))
		}})
	r.done(int64(s.Ended), left(s))
	return err
}

// purge is a step that deletes old rows of a table.
func (r *run) purge(table *purge.Table, olderThan time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		in, wait, _ := inBudget.Settings(r.parts.Ledger)
		n, err := table.Delete(ctx, r.pool, purge.Options{OlderThan: olderThan, Batch: r.Batch,
			Progress: r.deleted, DryRun: r.DryRun, Schema: in,
			Observer: inBudget.Observer(r.parts.Ledger), LockTimeout: wait})
		r.done(n, nil)
		return err
	}
}

func (r *run) purgeEntries(ctx context.Context) error {
	var unread int
	var err error
	if !r.DryRun {
		if unread, err = r.numberFeed(ctx); err != nil {
			return err
		}
	}
	locked := func(p budget.PurgeReport) map[string]int {
		return map[string]int{"locked": p.Busy, "unread": unread}
	}
	p, err := r.parts.Ledger.Purge(ctx, r.pool, budget.PurgeOptions{
		OlderThan: r.Entries, Batch: r.Batch, Forget: r.Forget, After: r.After, DryRun: r.DryRun,
		Progress: func(p budget.PurgeReport) {
			r.reached(p)
			r.progress(p.Entries, locked(p))
		},
	})
	r.done(p.Entries, locked(p))
	if r.reached(p); err == nil {
		r.report.After = ""
	}
	return err
}

// numberFeed gives numbers to entries, which the purge keeps without them, if anybody consumes the feed. It
// returns how many entries the slowest consumer has not consumed.
func (r *run) numberFeed(ctx context.Context) (unread int, err error) {
	consumers, err := r.parts.Ledger.FeedConsumers(ctx, r.pool)
	if err == nil && len(consumers) > 0 {
		if _, err = r.parts.Ledger.NumberFeed(ctx, r.pool); err == nil {
			consumers, err = r.parts.Ledger.FeedConsumers(ctx, r.pool)
		}
	}
	for _, c := range consumers {
		unread = max(unread, int(c.Unread))
	}
	return unread, err
}

// reached notes how far the purge of entries came.
func (r *run) reached(p budget.PurgeReport) {
	if p.Last != "" {
		r.report.After = p.Last
	}
}

// deleted is Progress of the other purges.
func (r *run) deleted(n int64) { r.progress(n, nil) }
