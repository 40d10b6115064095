// Command agent gives agents' runs budgets of their own, out of their users': a run under a user, agents under the
// run.
//
//	go run ./examples/agent
//
// Read agent.go and README.md. main.go runs it on a throwaway Postgres, or on that of DATABASE_URL in a database of its own that it
// drops at the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/leases"
)

func main() {
	exampledb.With("agent", exampledb.Options{SQL: callsSQL}, func(ctx context.Context, db *exampledb.Database) error {
		o, err := newOffice(db.Pool)
		if err != nil {
			return err
		}
		return story(ctx, os.Stdout, o)
	})
}

func story(ctx context.Context, out io.Writer, o *office) error {
	stands := func() error {
		used, left, err := o.left(ctx, "ann")
		fmt.Fprintf(out, "ann: %d used this month, %d left\n", used, left)
		return err
	}
	fmt.Fprintln(out, "Ann has 1000 units a month. A run gets 600 of them, and its two agents 250 each.")
	_, err := o.work(ctx, "ann", "42", 600, time.Hour, func(ctx context.Context, r *run) error {
		if err := stands(); err != nil {
			return err
		}
		fmt.Fprintln(out, "\nThe first makes 40 calls of 10 at once, the second 5. The run gets the rest back.")
		for i, calls := range []int{40, 5} {
			lease, err := r.sub(ctx, fmt.Sprint("agent-", i+1), 250, time.Hour, func(ctx context.Context, agent *run) error {
				made, refused, err := agent.callAtOnce(ctx, calls, 10)
				fmt.Fprintf(out, "agent-%d: %d calls made, %d refused\n", i+1, made, refused)
				return err
			})
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "agent-%d used %d of %d\n", i+1, lease.Spent, lease.Granted)
		}
		fmt.Fprintln(out, "\nA call that is sent again is answered again, and costs nothing.")
		for range 2 {
			_, replayed, err := r.call(ctx, "summary", "write", 20)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "summary: replayed: %v\n", replayed)
		}
		fmt.Fprintln(out, "\nAnother run cannot get the units of this one.")
		_, err := o.work(ctx, "ann", "43", 500, time.Hour, nil)
		var refused *budget.ExceededError
		if !errors.As(err, &refused) {
			return errors.Join(err, errors.New("it was given"))
		}
		fmt.Fprintf(out, "run 43: refused, %d of the month are free\n", refused.Refusals[0].Available)
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "\nThe run is over. Used units are in Ann's ledger, and the rest is hers.")
	if err := stands(); err != nil {
		return err
	}
	return crash(ctx, out, o, stands)
}

// crash begins a run that nobody ends, as if its process was gone.
func crash(ctx context.Context, out io.Writer, o *office, stands func() error) error {
	fmt.Fprintln(out, "\nA run crashes, and its agent with it. At its deadline the sweeper ends both.")
	err := o.abandon(ctx, "ann", "44", 300, time.Second)
	if err == nil {
		err = stands()
	}
	if err != nil {
		return err
	}
	ended := 0
	err = exampledb.Await(ctx, func() (bool, error) {
		report, err := leases.Sweep(ctx, o.db, o.client.Budget)
		ended += report.Settled
		return ended == 2, err
	})
	if err != nil {
		return err
	}
	if err := stands(); err != nil {
		return err
	}
	report, err := o.client.Budget.Verify(ctx, o.db, budget.VerifyOptions{})
	fmt.Fprintf(out, "verified %d entries: %d differences\n", report.Entries, len(report.Differences))
	return err
}

// abandon is a run and its agent that make a call each, and are not heard of any more.
func (o *office) abandon(ctx context.Context, user, id string, units int64, after time.Duration) error {
	r, err := o.begin(ctx, ofUser(user, id, units, after))
	if err != nil {
		return err
	}
	agent, err := r.begin(ctx, r.part("agent", units/2, after))
	if err != nil {
		return err
	}
	_, _, err = r.call(ctx, "last", "think", 7)
	_, _, failed := agent.call(ctx, "last", "search", 8)
	return errors.Join(err, failed)
}

// callAtOnce makes n calls at the same time.
func (r *run) callAtOnce(ctx context.Context, n int, units int64) (made, refused int, err error) {
	return exampledb.Admitted(n, func(i int) error {
		_, _, err := r.call(ctx, fmt.Sprint("call-", i+1), "search", units)
		return err
	})
}
