package main

import (
	"context"

	"github.com/pgmetered/metered/budget"
)

// ledger prints every entry with the running sum after it, and has the library verify them all.
func (s *story) ledger(ctx context.Context) {
	s.awaitWorkers(ctx)
	s.title("The ledger, with its running sums")
	var entries int64
	for _, account := range []string{account, racing} {
		entries += s.chain(ctx, account)
	}
	verified := must(s.app.metered.Budget.Verify(ctx, s.db.Pool, budget.VerifyOptions{}))
	s.line("verified %d entries of %d scopes", verified.Entries, verified.Scopes)
	for _, d := range verified.Differences {
		s.line("        %v", d)
	}
	check(s.report, "differences", len(verified.Differences), 0)
	check(s.report, "entries verified are those printed", verified.Entries, entries)
	total := must(count(ctx, s.db.Pool))
	check(s.report, "one of each for every upload", total, counts{
		Entries: total.Rows, Operations: total.Rows, Spent: total.Rows, Rows: total.Rows, Jobs: total.Rows,
	})
}

// chain prints one account's entries.
func (s *story) chain(ctx context.Context, account string) (entries int64) {
	scope := scopeOf(account)
	var sum, broken int64
	table := [][]any{{scope, "kind", "amount", "spent", "at", "for"}}
	for e, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{}) {
		ok(err)
		entries++
		sum += e.Amount // there are only charges here
		if e.Seq != entries || e.Spent != sum {
			broken++
		}
		table = append(table, []any{e.Seq, e.Kind, e.Amount, e.Spent, e.At.UTC().Format("15:04:05.000000"), e.Note.Reason})
	}
	s.table(table...)
	check(s.report, "entries whose number or sum is wrong", broken, 0)
	plan := s.app.plans[account]
	check(s.report, "spent within the plan", sum <= plan.Hourly, true)
	return entries
}
