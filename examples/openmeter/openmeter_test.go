package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func open(t *testing.T) (*exporter, *fake) {
	t.Helper()
	receiver := newFake("om_test")
	x, err := newExporter(exampletest.Open(t, exportSQL), exampletest.Serve(t, receiver), "om_test")
	require.NoError(t, err)
	x.pause = time.Microsecond
	return x, receiver
}

// Whatever answers are lost, and wherever the exporter dies, the meter has the ledger's sums.
func TestExport_CountsEachEntryOnce(t *testing.T) {
	t.Parallel()
	x, receiver := open(t)
	want := map[string]int64{}
	r := pgtest.Random(t)
	deaths, died := 0, false
	for round := range 10 {
		for i := range 12 {
			scope, amount := fmt.Sprint("org/", i%5), 1+r.Int64N(50)
			posted, err := x.ledger.ChargeNow(t.Context(), x.db, budget.Charge{Scope: scope, Amount: amount})
			require.NoError(t, err)
			want[scope] += amount
			if i == 0 {
				require.NoError(t, pgx.BeginFunc(t.Context(), x.db, func(tx pgx.Tx) error {
					_, err := x.ledger.Refund(t.Context(), tx, budget.Refund{Scope: scope, Seq: posted.Seq, Amount: 1})
					return err
				}))
				want[scope]--
			}
		}
		ctx, die := context.WithCancel(t.Context())
		receiver.mu.Lock()
		died = false
		receiver.breaks = func() (before, after bool) {
			if round%3 == 0 && !died {
				died = true
				die() // the batch counts, and nobody is there to hear it
			}
			return r.IntN(4) == 0, r.IntN(4) == 0
		}
		receiver.mu.Unlock()
		for x.run(ctx) != nil {
			deaths++
			ctx = t.Context()
		}
		die()
	}
	require.Positive(t, deaths)
	require.Equal(t, want, receiver.sums)
	require.Positive(t, receiver.again)
	require.Zero(t, pgtest.Count(t, x.db, "openmeter_attempts"))
}

// The answer was lost, and before the batch is sent again its scope has an alias: the receiver knows the event by its first id.
func TestExport_SendsAnEventAgainAsWhatItWasSent(t *testing.T) {
	t.Parallel()
	x, receiver := open(t)
	x.tries = 1
	_, err := x.ledger.ChargeNow(t.Context(), x.db, budget.Charge{Scope: "org/acme/user/ann", Amount: 5})
	require.NoError(t, err)
	receiver.breaks = func() (bool, bool) { return false, true }
	require.ErrorContains(t, x.run(t.Context()), "502 after 1 tries")
	receiver.breaks = func() (bool, bool) { return false, false }
	for _, table := range []string{"ledger", "feed", "feed_scopes"} { // as module privacy does
		pgtest.Execute(t, x.db, "begin; set local session_replication_role = replica; update metered."+table+" set scope = 'org/acme/gone/7f3a'; commit")
	}
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, 1, receiver.again)
	require.Equal(t, map[string]int64{"org/acme/user/ann": 5}, receiver.sums)
}

func TestExport_AWrongKeyLosesNothing(t *testing.T) {
	t.Parallel()
	x, receiver := open(t)
	_, err := x.ledger.ChargeNow(t.Context(), x.db, budget.Charge{Scope: "org/acme", Amount: 5})
	require.NoError(t, err)
	x.key = "wrong"
	require.ErrorContains(t, x.run(t.Context()), "401")
	x.key = "om_test"
	require.NoError(t, x.run(t.Context()))
	require.Equal(t, map[string]int64{"org/acme": 5}, receiver.sums)
}

func TestMain_Runs(t *testing.T) {
	t.Parallel()
	rest, _ := exampletest.Start(t, pgtest.ConnString(pgtest.Open(t)), "acme 12, zeta 2")
	require.Equal(t, ", 3 events came twice", rest)
}
