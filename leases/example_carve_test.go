package leases_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
)

// An agent's run gets part of its user's budget, and gives part of that to a step. Units that a step does not use are
// free for the run again, and units that the run does not use are free for the user.
func ExampleCarver_Carve() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	carver, err := leases.NewCarver(ledger)
	if err != nil {
		log.Fatal(err)
	}
	daily := []budget.Limit{budget.PerWindow(1_000, 24*time.Hour)}
	prepaid := []budget.Limit{budget.Prepaid(0)}

	// In a program each of these steps is a transaction of its own, with the writes that belong to it.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := carver.Carve(ctx, tx, leases.Carving{
			Child: "run/42", TTL: time.Hour, // a run that crashes is ended then, by Sweep or a Pool
			From: budget.Charge{Scope: "user/ann", Amount: 500, Limits: daily},
		})
		if err != nil {
			return err
		}
		_, err = carver.Carve(ctx, tx, leases.Carving{
			Child: "run/42/step/1", TTL: time.Minute, From: budget.Charge{Scope: "run/42", Amount: 200, Limits: prepaid},
		})
		if err != nil {
			return err
		}
		if _, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42/step/1", Amount: 120, Limits: prepaid}); err != nil {
			return err
		}
		_, err = ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42/step/1", Amount: 81, Limits: prepaid})
		fmt.Println("more than the step has:", errors.Is(err, budget.ErrExceeded))

		for _, child := range []string{"run/42/step/1", "run/42"} {
			lease, err := carver.End(ctx, tx, child, budget.Note{})
			if err != nil {
				return err
			}
			fmt.Printf("%s used %d of %d\n", child, lease.Spent, lease.Granted)
		}
		_, err = ledger.Charge(ctx, tx, budget.Charge{Scope: "run/42", Amount: 1})
		fmt.Println("after the end:", errors.Is(err, budget.ErrScopeClosed))
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	usage, err := ledger.Usage(ctx, pool, budget.Query{Scope: "user/ann", Window: 24 * time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the user has", usage[0].Available(1_000), "left")
	// Output:
	// more than the step has: true
	// run/42/step/1 used 120 of 200
	// run/42 used 120 of 500
	// after the end: true
	// the user has 880 left
}

// A run goes on in another region, which has a Postgres cluster of its own, and takes part of its user's budget along. Each step
// commits before the next one begins, and can be repeated. Package carvejobs does these steps by jobs.
func ExampleCarver_Receive() {
	ctx := context.Background()
	home, closeHome := exampleDatabase()
	defer closeHome()
	away, closeAway := exampleDatabase()
	defer closeAway()
	ledger, err := budget.New(budget.Config{}) // the same settings on both
	if err != nil {
		log.Fatal(err)
	}
	carver, err := leases.NewCarver(ledger)
	if err != nil {
		log.Fatal(err)
	}
	step := func(db *pgxpool.Pool, do func(tx pgx.Tx) (leases.Lease, error)) (lease leases.Lease) {
		err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) (err error) {
			lease, err = do(tx)
			return err
		})
		if err != nil {
			log.Fatal(err)
		}
		return lease
	}
	carve := func(child string) leases.Lease {
		from := budget.Charge{Scope: "user/ann", Amount: 200, Limits: []budget.Limit{budget.PerWindow(1_000, 24*time.Hour)}}
		return step(home, func(tx pgx.Tx) (leases.Lease, error) {
			return carver.Carve(ctx, tx, leases.Carving{Child: child, From: from, TTL: time.Hour, Away: true})
		})
	}

	lease := carve("run/42")
	step(away, func(tx pgx.Tx) (leases.Lease, error) {
		return carver.Receive(ctx, tx, leases.Lease{Child: "run/42", Granted: lease.Granted, EndsAt: lease.EndsAt}, budget.Note{})
	})
	_, err = ledger.ChargeNow(ctx, away, budget.Charge{Scope: "run/42", Amount: 120, Limits: []budget.Limit{budget.Prepaid(0)}})
	if err != nil {
		log.Fatal(err)
	}
	closed := step(away, func(tx pgx.Tx) (leases.Lease, error) { return carver.End(ctx, tx, "run/42", budget.Note{}) })
	settled := step(home, func(tx pgx.Tx) (leases.Lease, error) {
		return carver.SettleAway(ctx, tx, "run/42", closed.Spent, budget.Note{})
	})
	fmt.Println("run/42 used", settled.Spent, "of", settled.Granted)

	carve("run/43")
	// … and its cluster burns down. Nobody knows how many units it used, so all of them count.
	lost := step(home, func(tx pgx.Tx) (leases.Lease, error) {
		return carver.WriteOff(ctx, tx, "run/43", budget.Note{Actor: "ann@ops", Reason: "region lost"})
	})
	fmt.Println("run/43 is taken to have used", lost.Spent)
	usage, err := ledger.Usage(ctx, home, budget.Query{Scope: "user/ann", Window: 24 * time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the user has", usage[0].Available(1_000), "left")
	// Output:
	// run/42 used 120 of 200
	// run/43 is taken to have used 200
	// the user has 680 left
}
