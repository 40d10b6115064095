package budget_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

func seqsOf(entries []budget.Entry) (seqs []int64) {
	for _, e := range entries {
		seqs = append(seqs, e.Seq)
	}
	return seqs
}

// Pages of a range of time, forwards and backwards, from wherever the page before ended.
func TestEntries_OfARangeOfTimeAPageAtATime(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for range 60 { // at minutes 0, 0, 0, 1, 1, 1, …
		mustCharge(t, pool, l, "a", 1)
		if u := usage(t, pool, l, "a", 0); u.Seq%3 == 0 {
			clock.Advance(time.Minute)
		}
	}
	from, to := start.Add(5*time.Minute), start.Add(11*time.Minute) // 16 to 33
	pages := func(opts budget.EntriesOptions) (seqs []int64) {
		opts.Max = 4
		for {
			var page []budget.Entry
			for e, err := range l.Entries(t.Context(), pool, "a", opts) {
				require.NoError(t, err)
				page = append(page, e)
			}
			if len(page) == 0 {
				return seqs
			}
			seqs = append(seqs, seqsOf(page)...)
			opts.After, opts.Before = seqs[len(seqs)-1], 0
			if opts.NewestFirst {
				opts.After, opts.Before = 0, seqs[len(seqs)-1]
			}
		}
	}
	sequence := func(from, to int64) (seqs []int64) {
		for n := from; n != to; {
			seqs = append(seqs, n)
			if from < to {
				n++
			} else {
				n--
			}
		}
		return seqs
	}
	require.Equal(t, sequence(16, 34), pages(budget.EntriesOptions{From: from, To: to}))
	require.Equal(t, sequence(33, 15), pages(budget.EntriesOptions{From: from, To: to, NewestFirst: true}))
	require.Equal(t, sequence(16, 61), pages(budget.EntriesOptions{From: from}))
	require.Equal(t, sequence(1, 34), pages(budget.EntriesOptions{To: to}))
	require.Equal(t, sequence(20, 34), pages(budget.EntriesOptions{From: from, To: to, After: 19}))
	require.Empty(t, pages(budget.EntriesOptions{From: to.Add(time.Hour)}))
	require.Empty(t, pages(budget.EntriesOptions{To: start}))
}

func TestEntries_ByNoteAndOperation(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	client, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	for i := range 30 {
		c := budget.Charge{Scope: "a", Amount: 1, Note: budget.Note{Actor: fmt.Sprint("user ", i%3), Reason: fmt.Sprint("reason ", i%5)}}
		switch {
		case i%10 == 9: // no note
			mustCharge(t, pool, l, "a", 1)
		case i%2 == 0:
			_, err = metered.Do[any](ctx, client, metered.Command{Tenant: "acme", ID: fmt.Sprint("o", i), Name: fmt.Sprint("import ", i%4), Charges: []budget.Charge{c}}, nil)
		default:
			err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { _, err := l.Charge(ctx, tx, c); return err })
		}
		require.NoError(t, err)
		clock.Advance(time.Minute)
	}
	late := event("e", "a", 1)
	late.OccurredAt, late.Note = start, budget.Note{Actor: "user 0"}
	_, err = ingest(ctx, pool, l, late)
	require.NoError(t, err)
	clock.Advance(time.Minute)

	search := func(opts budget.EntriesOptions) (found []budget.Entry) {
		t.Helper()
		for e, err := range l.Entries(ctx, pool, "a", opts) {
			require.NoError(t, err)
			found = append(found, e)
		}
		return found
	}
	all := search(budget.EntriesOptions{})
	require.Len(t, all, 31)
	matching := func(match func(budget.Entry) bool) (seqs []int64) {
		for _, e := range all {
			if match(e) {
				seqs = append(seqs, e.Seq)
			}
		}
		require.NotEmpty(t, seqs)
		return seqs
	}
	for _, c := range []struct {
		search budget.EntriesOptions
		match  func(budget.Entry) bool
	}{
		{budget.EntriesOptions{Note: budget.Note{Actor: "user 0"}}, func(e budget.Entry) bool { return e.Note.Actor == "user 0" }},
		{budget.EntriesOptions{Note: budget.Note{Actor: "user 1", Reason: "reason 2"}},
			func(e budget.Entry) bool { return e.Note == budget.Note{Actor: "user 1", Reason: "reason 2"} }},
		{budget.EntriesOptions{OperationTenant: "acme", Operation: "o4"}, func(e budget.Entry) bool { return e.Operation == "o4" }},
		{budget.EntriesOptions{Operation: "e"}, func(e budget.Entry) bool { return e.Operation == "e" }},
		{budget.EntriesOptions{Name: "import 2"}, func(e budget.Entry) bool { return e.Operation != "" && e.Operation != "e" && (e.Seq-1)%4 == 2 }},
		{budget.EntriesOptions{Name: "import 0", Note: budget.Note{Actor: "user 2"}},
			func(e budget.Entry) bool { return e.Operation != "" && e.Note.Actor == "user 2" && (e.Seq-1)%4 == 0 }},
	} {
		want := matching(c.match)
		require.Equal(t, want, seqsOf(search(c.search)), "%+v", c.search)
		// Any number found and looked at in a statement, both ways.
		for _, newest := range []bool{false, true} {
			for _, size := range []struct{ most, look int }{{0, 1}, {1, 2}, {2, 5}, {100, 4}, {3, 31}, {0, 32}} {
				opts, wanted, got := c.search, slices.Clone(want), []int64(nil)
				opts.NewestFirst, opts.Max = newest, size.most
				if newest {
					slices.Reverse(wanted)
				}
				if size.most > 0 {
					wanted = wanted[:min(size.most, len(wanted))]
				}
				for e, err := range budget.Search(ctx, l, pool, "a", opts, size.look) {
					require.NoError(t, err)
					got = append(got, e.Seq)
				}
				require.Equal(t, wanted, got, "%+v, %d", opts, size.look)
			}
		}
	}
	for _, nothing := range []budget.EntriesOptions{{Operation: "o4"}, {OperationTenant: "acme", Operation: "e"}, {Name: "import"}, {Note: budget.Note{Tenant: "user 0"}}} {
		require.Empty(t, search(nothing), "%+v", nothing)
	}
	byTime := budget.EntriesOptions{Note: budget.Note{Actor: "user 0"}}
	byTime.From, byTime.To = start.Add(6*time.Minute), start.Add(13*time.Minute)
	require.Equal(t, []int64{7, 13}, seqsOf(search(byTime))) // 10 has no note
}

// With any number of entries: it reads those that it looks at, and their operations where a name is asked for.
func TestPlans_ASearchReadsOnlyTheEntriesThatItLooksAt(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool, l, _ := open(t)
	for _, table := range []string{"ledger", "operations"} {
		execute(t, pool, "alter table metered."+table+" set (autovacuum_enabled = off)")
	}
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	look := func(opts budget.EntriesOptions) {
		t.Helper()
		for range budget.Search(ctx, l, conn, "a", opts, 200) {
			require.Fail(t, "nothing is to be found")
		}
	}
	searches := []budget.EntriesOptions{{Note: budget.Note{Actor: "nobody"}}, {Name: "nothing"}}
	for range 10 {
		for _, s := range searches {
			look(s)
		}
	}
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, operation_tenant, operation)
		select g, 1, now(), g, 0, 0, 0, 0, 'c', 'a', '', 'o' || g from generate_series(1, 20000) g`)
	execute(t, pool, `insert into metered.operations (at, tenant, id, fingerprint, result, name)
		select now(), '', 'o' || g, '', '', 'import' from generate_series(1, 20000) g`)
	for _, newest := range []bool{false, true} {
		for i, s := range searches {
			s.NewestFirst, s.After, s.Before = newest, 9000, 9200
			scans := tableStat(t, conn, "ledger", "seq_scan") + tableStat(t, conn, "operations", "seq_scan")
			entries, operations := indexReads(t, conn), tuplesFetched(t, conn, "operations")
			look(s)
			require.LessOrEqual(t, indexReads(t, conn)-entries, int64(2*200+20))
			require.LessOrEqual(t, tuplesFetched(t, conn, "operations")-operations, int64(i*201))
			require.Equal(t, scans, tableStat(t, conn, "ledger", "seq_scan")+tableStat(t, conn, "operations", "seq_scan"))
		}
	}
}
