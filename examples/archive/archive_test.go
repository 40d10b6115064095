package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func open(t *testing.T) (*archive, *pgtest.Clock) {
	t.Helper()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC))
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	return &archive{db: pool, ledger: ledger, dir: t.TempDir()}, clock
}

func (a *archive) charge(t *testing.T, scope string, amount int64) {
	t.Helper()
	_, err := a.ledger.ChargeNow(t.Context(), a.db, budget.Charge{Scope: scope, Amount: amount})
	require.NoError(t, err)
}

// again is another process on the same directory.
func (a *archive) again() *archive { return &archive{db: a.db, ledger: a.ledger, dir: a.dir} }

func (a *archive) files(t *testing.T) (names []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(a.dir, "2*.jsonl"))
	require.NoError(t, err)
	slices.Sort(paths)
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	return names
}

// holds checks that the files have the feed's entries, each once, in order, as the manifest says.
func (a *archive) holds(t *testing.T) {
	t.Helper()
	var got []budget.FeedEntry
	sums := make(map[string]closedFile)
	for _, name := range a.files(t) {
		text, err := os.ReadFile(filepath.Join(a.dir, name))
		require.NoError(t, err)
		first := len(got)
		for line := range bytes.Lines(text) {
			var e budget.FeedEntry
			require.NoError(t, json.Unmarshal(line, &e), "%s: %s", name, line)
			got = append(got, e)
		}
		sums[name] = closedFile{name, got[first].Number, got[len(got)-1].Number, fmt.Sprintf("%x", sha256.Sum256(text))}
	}
	var want []budget.FeedEntry
	for e, err := range a.ledger.Feed(t.Context(), a.db, "", budget.FeedOptions{}) {
		require.NoError(t, err)
		want = append(want, e)
	}
	require.Equal(t, want, got)
	last := a.again()
	require.NoError(t, last.cut(int64(len(want)+1)))
	for _, c := range last.closed {
		require.Equal(t, sums[c.File], c)
	}
}

// Wherever the writer dies, before the file, in the middle of it or before the commit, no entry is
// lost, and none stands twice.
func TestArchive_HasEachEntryOnceWhereverItDies(t *testing.T) {
	t.Parallel()
	a, clock := open(t)
	r := pgtest.Random(t)
	deaths, torn := 0, 0
	for day := range 4 {
		for range 12 {
			a.charge(t, fmt.Sprint("org/", r.IntN(5)), 1+r.Int64N(50))
		}
		if day%2 == 0 { // a page then goes over midnight
			clock.Advance(24 * time.Hour)
			continue
		}
		for try := 0; ; try++ {
			ctx, die := context.WithCancel(t.Context())
			dies := try < 4 && try != 1
			err := a.ledger.RunFeed(ctx, a.db, consumer, budget.FeedOptions{Max: 10}, func(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error {
				err := a.page(ctx, tx, entries)
				if dies && entries[len(entries)-1].Number%20 < 13 {
					die() // the file is written, and the transaction does not commit
				}
				return err
			})
			die()
			if err == nil && try > 4 {
				break
			}
			if err == nil {
				a.charge(t, "org/more", 1)
				continue
			}
			deaths++
			if is := a.open[len(a.open)-1]; try%2 == 0 { // the last line was not written to its end
				require.NoError(t, os.Truncate(filepath.Join(a.dir, is.name), is.size-1-r.Int64N(20)))
				torn++
			}
			if r.IntN(2) == 0 {
				a = a.again()
			}
		}
		clock.Advance(24 * time.Hour)
	}
	require.NoError(t, a.run(t.Context()))
	require.Positive(t, torn)
	require.Greater(t, deaths, torn)
	a.holds(t)
	require.Equal(t, []string{"2026-05-01.jsonl", "2026-05-02.jsonl", "2026-05-03.jsonl", "2026-05-04.jsonl"}, a.files(t))
	require.Len(t, a.closed, 4)
}

// A day that nothing follows is closed once the feed has passed it, and an entry that commits after
// that stands in the next file.
func TestArchive_ClosesADayThatTheFeedHasPassed(t *testing.T) {
	t.Parallel()
	a, clock := open(t)
	require.NoError(t, a.run(t.Context()), "nothing is there")
	a.charge(t, "org/acme", 5)
	late, err := a.db.Begin(t.Context())
	require.NoError(t, err)
	_, err = a.ledger.Charge(t.Context(), late, budget.Charge{Scope: "org/late", Amount: 1})
	require.NoError(t, err)
	require.NoError(t, a.run(t.Context()))
	require.Empty(t, a.closed)
	clock.Advance(12 * time.Hour)
	require.NoError(t, a.run(t.Context()))
	require.Len(t, a.closed, 1)
	require.NoError(t, late.Commit(t.Context()))
	other := a.again()
	require.NoError(t, other.run(t.Context()))
	require.Equal(t, []string{"2026-05-01.jsonl", "2026-05-02.jsonl"}, a.files(t))
	clock.Advance(24 * time.Hour)
	late, err = a.db.Begin(t.Context())
	require.NoError(t, err)
	_, err = a.ledger.Charge(t.Context(), late, budget.Charge{Scope: "org/late", Amount: 2})
	require.NoError(t, err)
	a.charge(t, "org/acme", 6)
	require.NoError(t, other.run(t.Context()))
	clock.Advance(24 * time.Hour)
	require.NoError(t, a.run(t.Context()), "which closes what the other knows to be open")
	require.NoError(t, late.Commit(t.Context()))
	require.NoError(t, other.run(t.Context()))
	require.Len(t, a.files(t), 4)
	a.holds(t)
}

// An archive that does not go on where it ended is left as it is.
func TestArchive_RefusesAnotherFeed(t *testing.T) {
	t.Parallel()
	a, clock := open(t)
	a.charge(t, "org/acme", 5)
	a.charge(t, "org/acme", 6)
	require.NoError(t, a.run(t.Context()))
	path := filepath.Join(a.dir, "2026-05-01.jsonl")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text[:len(text)-9], 0o600))
	a.charge(t, "org/acme", 7)
	require.EqualError(t, a.run(t.Context()), "the archive ends with number 1, and the feed goes on with 3. Begin a new archive")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	clock.Advance(24 * time.Hour)
	require.NoError(t, a.run(t.Context()))
	a.holds(t)
	require.NoError(t, pgx.BeginFunc(t.Context(), a.db, func(tx pgx.Tx) error {
		_, err := a.ledger.DropFeedConsumer(t.Context(), tx, consumer)
		return err
	}))
	require.ErrorContains(t, a.run(t.Context()), "number 1 is in a closed file")
}

func TestMain_Runs(t *testing.T) {
	t.Parallel()
	url := pgtest.ConnString(pgtest.Open(t))
	rest, _ := exampletest.Start(t, url, "closed files: 0, open files: 1, ")
	require.Equal(t, "last number: 3", rest)
}
