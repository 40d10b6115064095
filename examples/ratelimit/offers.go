package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/leases"
)

// offersPerHour is how often all clients together may look at the offers.
const offersPerHour = 300_000

// looks is the limit of all clients together.
var looks = []budget.Limit{budget.PerWindow(offersPerHour, time.Hour).Named("looks")}

// offers limits GET /offers, a public look that writes nothing. The limit is decided from memory, by leases of this
// process: as exact as a charge, in nanoseconds. The price: the slice of a killed process counts as used.
type offers struct {
	leases  *leases.Pool
	limited func(http.Handler) http.Handler
}

func newOffers(pool *pgxpool.Pool) (*offers, error) {
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		return nil, err
	}
	p, err := leases.New(pool, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "offers/"}}})
	if err != nil {
		return nil, err
	}
	limited, err := httpmetered.LimitLeased(p, httpmetered.LimitConfig{Kind: "offers", Shared: looks})
	return &offers{p, limited}, err
}

func serveOffers(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode([]string{"WELCOME", "SUMMER"})
}

// compare sends a third more requests than the limit admits, by 8 goroutines: once with a charge in a transaction
// each, of a hundredth of the limit, and once from memory.
func compare(ctx context.Context, out io.Writer, pool *pgxpool.Pool) error {
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		return err
	}
	o, err := newOffers(pool)
	if err != nil {
		return err
	}
	limiter, err := o.leases.Limiter(budget.Charge{Scope: "offers/compared", Amount: 1, Limits: looks})
	if err != nil {
		return err
	}
	exact := budget.Charge{Scope: "offers/exact", Amount: 1, Limits: []budget.Limit{budget.PerWindow(offersPerHour/100, time.Hour)}}
	for _, way := range []struct {
		name string
		asks int64
		ask  func() error
	}{
		{"a charge each", offersPerHour / 75, func() error { _, err := ledger.ChargeNow(ctx, pool, exact); return err }},
		{"from memory", offersPerHour / 3 * 4, func() error { return limiter.AllowN(ctx, 1) }},
	} {
		admitted, refused, took, err := askFor(ctx, way.asks, way.ask)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  %s: admitted: %d, refused: %d, %.0f decisions a second\n",
			way.name, admitted, refused, float64(admitted+refused)/took.Seconds())
	}
	if err := o.leases.Close(ctx); err != nil {
		return err
	}
	used, err := ledger.Usage(ctx, pool, budget.Query{Scope: "offers/compared", Window: time.Hour})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "  in the ledger of the second, once its leases are settled: %d\n", used[0].Used)
	return nil
}

// askFor asks n times. Where units are only with a slice that is being given back, it asks again.
func askFor(ctx context.Context, n int64, ask func() error) (admitted, refused int64, took time.Duration, err error) {
	var asked, yes, no atomic.Int64
	var group sync.WaitGroup
	errs := make([]error, 8)
	began := time.Now()
	for i := range errs {
		group.Go(func() {
			for asked.Add(1) <= n {
				var refused *budget.ExceededError
				for errs[i] = ask(); errors.As(errs[i], &refused) && refused.Refusals[0].Leased > 0 && ctx.Err() == nil; errs[i] = ask() {
					time.Sleep(time.Millisecond)
				}
				switch {
				case errs[i] == nil:
					yes.Add(1)
				case errors.Is(errs[i], budget.ErrExceeded):
					no.Add(1)
					errs[i] = nil
				default:
					return
				}
			}
		})
	}
	group.Wait()
	return yes.Load(), no.Load(), time.Since(began), errors.Join(errs...)
}
