package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/leases/carvejobs"
)

// sale sells units of acme, in the clusters eu and us.
type sale struct {
	out      io.Writer
	pools    map[string]*pgxpool.Pool
	clients  map[string]*metered.Client
	clusters *carvejobs.Clusters
	sales    int
}

const (
	acme = "acme"    // the budget, in eu
	part = "acme/us" // the part of us
)

var scopes = map[string]string{"eu": acme, "us": part}

// sell sells 10 units in a cluster, in a command of its own: with the same id it is never sold twice.
func (s *sale) sell(ctx context.Context, cluster, id string) error {
	_, err := metered.Do[int](ctx, s.clients[cluster], metered.Command{ID: id, Charges: []budget.Charge{
		{Scope: scopes[cluster], Amount: 10, Limits: []budget.Limit{budget.Prepaid(0)}},
	}}, nil)
	return err
}

// again sends a request again while that may help: a connection to a server that was killed is found broken when it is used.
func again(ctx context.Context, send func() error) error {
	for {
		err := send()
		if err == nil || !metered.Retryable(err) || ctx.Err() != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// sellMany makes n sales in each of the clusters at the same time.
func (s *sale) sellMany(ctx context.Context, n map[string]int) error {
	var mu sync.Mutex
	var all error
	var wg sync.WaitGroup
	for cluster, n := range n {
		for range n {
			s.sales++
			id := fmt.Sprint("sale-", s.sales)
			wg.Go(func() {
				err := again(ctx, func() error { return s.sell(ctx, cluster, id) })
				mu.Lock()
				defer mu.Unlock()
				all = errors.Join(all, err)
			})
		}
	}
	wg.Wait()
	return all
}

// sold is the number of units that a cluster has sold. Units of us count in eu, too, once its message has arrived.
func (s *sale) sold(ctx context.Context, cluster string) (int64, error) {
	var u []budget.Usage
	err := again(ctx, func() (err error) {
		u, err = s.clients[cluster].Budget.Usage(ctx, s.pools[cluster], budget.Query{Scope: scopes[cluster]})
		return err
	})
	if err != nil {
		return 0, err
	}
	return u[0].Spent, nil
}

func (s *sale) run(ctx context.Context, crash func() error, recover func(context.Context) error) error {
	say := func(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }
	_, err := metered.Do(ctx, s.clients["eu"], metered.Command{ID: "top-up", Input: 1000}, func(_ context.Context, tx *metered.Tx) (int, error) {
		return 0, tx.Credit(budget.Credit{Scope: acme, Amount: 1000})
	})
	if err != nil {
		return err
	}
	link := carvejobs.Link{Home: "eu", Away: "us", Child: part}
	_, err = s.clusters.Carve(ctx, carvejobs.Carving{
		Link: link, From: budget.Charge{Scope: acme, Amount: 400, Limits: []budget.Limit{budget.Prepaid(0)}}, TTL: time.Hour,
	})
	if err != nil {
		return err
	}
	if _, err := s.lease(ctx, "us", func(leases.Lease) bool { return true }); err != nil {
		return err
	}
	say("The cluster eu has a budget of 1000 units. 400 of them are carved for the cluster us.")

	if err := s.sellMany(ctx, map[string]int{"eu": 20, "us": 15}); err != nil {
		return err
	}
	say("Both sell at the same time, each on its own disk: 200 in eu, 150 in us.")

	if err := crash(); err != nil {
		return err
	}
	say("us is killed (-9).")
	short, cancel := context.WithTimeout(ctx, time.Second)
	err = s.sell(short, "us", "in-between")
	cancel()
	say("A sale in us fails: %t. Nobody has to know whether it was made: its id is sent again later.", err != nil)
	if err := s.sellMany(ctx, map[string]int{"eu": 40}); err != nil {
		return err
	}
	var exceeded *budget.ExceededError
	if err := s.sell(ctx, "eu", "too-much"); !errors.As(err, &exceeded) {
		return fmt.Errorf("sold too much: %w", err)
	}
	say("eu goes on, and sells its 400 others. The next sale is refused: %d units are leased, to us.", exceeded.Refusals[0].Leased)

	if err := recover(ctx); err != nil {
		return err
	}
	for range 2 {
		if err := again(ctx, func() error { return s.sell(ctx, "us", "in-between") }); err != nil {
			return err
		}
	}
	if err := s.sellMany(ctx, map[string]int{"us": 4}); err != nil {
		return err
	}
	us, err := s.sold(ctx, "us")
	if err != nil {
		return err
	}
	say("us is back. The sale that failed is sent twice, and made once; with 4 more, us has sold %d.", us)

	err = again(ctx, func() error {
		_, err := s.clusters.End(ctx, link, budget.Note{})
		return err
	})
	if err != nil {
		return err
	}
	err = s.sell(ctx, "us", "after")
	say("us is closed. A sale there is refused: %t.", errors.Is(err, budget.ErrScopeClosed))
	l, err := s.lease(ctx, "eu", func(l leases.Lease) bool { return !l.SettledAt.IsZero() })
	if err != nil {
		return err
	}
	say("eu hears that %d of %d were used: %d come back.", l.Spent, l.Granted, l.Granted-l.Spent)
	if err := s.sellMany(ctx, map[string]int{"eu": int(l.Granted-l.Spent) / 10}); err != nil {
		return err
	}
	return s.audit(ctx, us, say)
}

// lease waits until the lease is there on a cluster, and as is wanted.
func (s *sale) lease(ctx context.Context, cluster string, want func(leases.Lease) bool) (leases.Lease, error) {
	carver, err := leases.NewCarver(s.clients[cluster].Budget)
	if err != nil {
		return leases.Lease{}, err
	}
	for {
		l, err := carver.Get(ctx, s.pools[cluster], part)
		if err == nil && want(l) || err != nil && !errors.Is(err, leases.ErrUnknownChild) {
			return l, err
		}
		select {
		case <-ctx.Done():
			return l, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// audit adds up both sides.
func (s *sale) audit(ctx context.Context, us int64, say func(string, ...any)) error {
	eu, err := s.sold(ctx, "eu")
	if err != nil {
		return err
	}
	differences := 0
	for name, client := range s.clients {
		var report budget.VerifyReport
		err := again(ctx, func() (err error) {
			report, err = client.Budget.Verify(ctx, s.pools[name], budget.VerifyOptions{})
			return err
		})
		if err != nil {
			return err
		}
		differences += len(report.Differences)
	}
	say("It adds up: %d sold in eu and %d in us are %d of 1000; %d differences in the ledgers.", eu-us, us, eu, differences)
	if eu != 1000 || differences > 0 {
		return errors.New("it does not add up")
	}
	return nil
}
