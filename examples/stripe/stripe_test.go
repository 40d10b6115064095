package main

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func open(t *testing.T) (*exporter, *fake, *pgtest.Clock) {
	t.Helper()
	pool := exampletest.Open(t, exportSQL)
	clock := pgtest.SetClock(t, pool, time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC))
	stripe := newFake("sk_test", clock.Now)
	x, err := newExporter(pool, exampletest.Serve(t, stripe), "sk_test", clock.Now)
	require.NoError(t, err)
	x.pause = time.Microsecond
	return x, stripe, clock
}

func (x *exporter) charge(t *testing.T, scope string, amount int64) {
	t.Helper()
	_, err := x.ledger.ChargeNow(t.Context(), x.db, budget.Charge{Scope: scope, Amount: amount})
	require.NoError(t, err)
}

func (x *exporter) unsent(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, x.db, "select coalesce(string_agg(scope || '/' || seq || ': ' || why, '; ' order by scope, seq), '') from stripe_unsent")
}

// Whatever answers are lost, and wherever the exporter dies, the meter has the ledger's sums.
func TestExport_CountsEachEntryOnce(t *testing.T) {
	t.Parallel()
	x, stripe, _ := open(t)
	want := map[string]int64{}
	r := pgtest.Random(t)
	for i := range 150 {
		name, amount := fmt.Sprint(i%7), 1+r.Int64N(50)
		x.charge(t, "org/"+name, amount)
		want["cus_"+name] += amount
	}
	x.tries = 2 // so that pages fail, too
	deaths := 0
	for done := false; !done; {
		ctx, die := context.WithCancel(t.Context())
		stripe.mu.Lock()
		stripe.breaks = func() (before, after bool) {
			switch r.IntN(12) {
			case 0:
				return true, false
			case 1:
				return false, true
			case 2:
				if deaths < 5 {
					die() // the event may count, and nobody is there to hear it
				}
			}
			return false, false
		}
		stripe.mu.Unlock()
		if err := x.run(ctx); err == nil {
			done = true
		} else {
			deaths++
		}
		die()
	}
	require.Positive(t, deaths)
	require.Equal(t, want, stripe.sums)
	require.Greater(t, stripe.calls, 150, "some were sent again")
	require.Zero(t, stripe.queued, "a customer had two calls at once")
	require.Empty(t, x.unsent(t))
	require.Zero(t, pgtest.Count(t, x.db, "stripe_attempts"))
}

func TestExport_KeepsWhatStripeWouldNotTake(t *testing.T) {
	t.Parallel()
	x, stripe, clock := open(t)
	x.charge(t, "org/old", 9)
	clock.Advance(36 * 24 * time.Hour)
	x.charge(t, "org/acme", 5)
	x.charge(t, "user/ann", 3) // nobody's usage
	long := "org/" + strings.Repeat("x", 200)
	x.charge(t, long, 1)
	require.NoError(t, pgx.BeginFunc(t.Context(), x.db, func(tx pgx.Tx) error {
		_, err := x.ledger.Refund(t.Context(), tx, budget.Refund{Scope: "org/acme", Seq: 1, Amount: 2})
		return err
	}))
	x.charge(t, "org/unknown", 4)
	of := x.customer
	x.customer = func(scope string) string {
		if scope == "org/unknown" {
			return "none"
		}
		return of(scope)
	}
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, "org/acme/2: a refund: write a credit note; org/old/1: older than 35 days", x.unsent(t))
	require.Len(t, stripe.reported, 1)
	require.Contains(t, stripe.reported[0], "org/unknown/1/", "Stripe says so later")
	require.Equal(t, map[string]int64{"cus_acme": 5, "cus_" + strings.TrimPrefix(long, "org/"): 1}, stripe.sums)
}

// The answer was lost, and before the event is sent again its scope has an alias: Stripe knows the event by its first identifier.
func TestExport_SendsAnEventAgainAsWhatItWasSent(t *testing.T) {
	t.Parallel()
	x, stripe, _ := open(t)
	x.tries = 1
	x.customer = func(string) string { return "cus_acme" }
	x.charge(t, "org/acme/user/ann", 5)
	stripe.breaks = func() (bool, bool) { return false, true }
	require.ErrorContains(t, x.run(t.Context()), "502 after 1 tries")
	stripe.breaks = func() (bool, bool) { return false, false }
	for _, table := range []string{"ledger", "feed", "feed_scopes"} { // as module privacy does
		pgtest.Execute(t, x.db, "begin; set local session_replication_role = replica; update metered."+table+" set scope = 'org/acme/gone/7f3a'; commit")
	}
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, 2, stripe.calls)
	require.Equal(t, map[string]int64{"cus_acme": 5}, stripe.sums)
	require.Empty(t, x.unsent(t))
}

// The answer was lost, and the exporter stood still for a day: Stripe would count the event again.
func TestExport_SendsNothingAgainAfterADay(t *testing.T) {
	t.Parallel()
	x, stripe, clock := open(t)
	x.tries = 1
	x.charge(t, "org/acme", 5)
	stripe.breaks = func() (bool, bool) { return false, true }
	require.ErrorContains(t, x.run(t.Context()), "502 after 1 tries")
	stripe.breaks = func() (bool, bool) { return false, false }
	clock.Advance(25 * time.Hour)
	x.charge(t, "org/acme", 7)
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, int64(12), stripe.sums["cus_acme"])
	require.Contains(t, x.unsent(t), "org/acme/1: it may have been sent")
}

// The standby takes over without the last entry, which Stripe has, and gives its scope and number to another one: a charge of as
// many units. Both count.
func TestExport_TellsAnEntryFromTheOneThatAFailoverLost(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	opts := pgserver.Options{Settings: map[string]string{"fsync": "off"}}
	server, primary := pgtest.Start(t, opts)
	pgtest.Execute(t, primary, exportSQL)
	standby := pgtest.Standby(t, server, opts)
	stripe := newFake("sk_test", time.Now)
	x, err := newExporter(primary, exampletest.Serve(t, stripe), "sk_test", time.Now)
	require.NoError(t, err)
	x.charge(t, "org/acme", 5)
	require.NoError(t, x.run(t.Context()))
	pgtest.WaitFor(t, "the standby", func() bool {
		return pgtest.Value[bool](t, primary, "select coalesce(bool_and(replay_lsn = pg_current_wal_lsn()), false) from pg_stat_replication where state = 'streaming'")
	})
	require.NoError(t, syscall.Kill(pgtest.Value[int](t, primary, "select pid from pg_stat_replication"), syscall.SIGSTOP))
	x.charge(t, "org/acme", 7)
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, int64(12), stripe.sums["cus_acme"])

	require.NoError(t, server.Kill())
	pgtest.Execute(t, standby, "select pg_promote()")
	x.db = standby
	x.charge(t, "org/acme", 7)
	require.Equal(t, 2, pgtest.Count(t, standby, "metered.ledger"))
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, int64(19), stripe.sums["cus_acme"])
	require.NoError(t, x.run(t.Context()))
	require.Len(t, stripe.known, 3)
	require.Empty(t, x.unsent(t))
}

// An identifier is of what an entry keeps, and fits Stripe.
func TestIdentifier_FitsAndTellsEntriesApart(t *testing.T) {
	t.Parallel()
	e := budget.FeedEntry{Number: 1, Entry: budget.Entry{Scope: "org/acme", Seq: 9_000_000_000_000_000_000, Kind: budget.EntryCharge, Amount: 1, At: time.UnixMicro(1)}}
	again := e
	again.Number, again.Cursor = 2, "7.2"                        // of another server
	again.Operation, again.Note.Actor = "gone/7f3a", "gone/7f3a" // pseudonyms
	require.Equal(t, identifier(e), identifier(again))
	seen := map[string]bool{identifier(e): true}
	for _, change := range []func(*budget.FeedEntry){
		func(e *budget.FeedEntry) { e.At = time.UnixMicro(2) }, func(e *budget.FeedEntry) { e.Amount = 2 },
		func(e *budget.FeedEntry) { e.Kind = budget.EntryCapture },
		func(e *budget.FeedEntry) { e.Scope = "org/zeta" }, func(e *budget.FeedEntry) { e.Seq-- },
		func(e *budget.FeedEntry) { e.Scope = strings.Repeat("x", 255) }, func(e *budget.FeedEntry) { e.Scope = strings.Repeat("x", 255); e.Amount = 2 },
	} {
		other := e
		change(&other)
		require.False(t, seen[identifier(other)])
		require.LessOrEqual(t, len(identifier(other)), maxIdentifier)
		seen[identifier(other)] = true
	}
}

// A wrong key is no fault of an entry: all of them wait.
func TestExport_WaitsWhereNothingCanBeSent(t *testing.T) {
	t.Parallel()
	x, stripe, _ := open(t)
	x.charge(t, "org/acme", 5)
	x.key = "sk_wrong"
	require.ErrorContains(t, x.run(t.Context()), "401")
	x.key = "sk_test"
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, int64(5), stripe.sums["cus_acme"])
}

func TestMain_Runs(t *testing.T) {
	t.Parallel()
	rest, _ := exampletest.Start(t, pgtest.ConnString(pgtest.Open(t)), "acme 12, zeta 2")
	require.Equal(t, ", after 4 calls", rest)
}
