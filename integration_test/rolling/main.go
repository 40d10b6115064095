// Command rolling is an application, for the test of a rolling deploy: it is built once with this
// library and once with the next build. It makes calls of every kind until its standard input ends,
// and then prints the units that it committed. Its third argument is the pause between two calls of
// a kind. Named "migrate" or "drop previous" it migrates, and prints the report.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// Result is the program's report.
type Result struct {
	Calls   map[string]int   // committed, by kind
	Units   map[string]int64 // spent of each scope, refunds subtracted
	Errors  map[string]int
	Longest time.Duration // of a call
}

type app struct {
	name string // of the process
	pool *pgxpool.Pool
	c    *metered.Client
	book *wallet.Book
	lent *leases.Pool

	mu     sync.Mutex
	result Result
}

type note struct {
	N string `json:"n"`
}

func (note) Kind() string { return "note" }

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	if drop := os.Args[1] == "drop previous"; drop || os.Args[1] == "migrate" {
		report, err := metered.Migrate(ctx, pool, metered.MigrateOptions{DropPrevious: drop})
		if err != nil {
			log.Fatal(err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
			log.Fatal(err)
		}
		return
	}
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	if err != nil {
		log.Fatal(err)
	}
	a := &app{name: os.Args[1], pool: pool, result: Result{Calls: map[string]int{}, Units: map[string]int64{}, Errors: map[string]int{}}}
	cfg := metered.Config{River: client}
	cfg.OnThreshold = func(context.Context, pgx.Tx, budget.Crossing) error { return nil } // a field of its own in 0.1.0
	if a.c, err = metered.New(pool, cfg); err != nil {
		log.Fatal(err)
	}
	if a.book, err = wallet.New(a.c.Budget, wallet.Config{}); err != nil {
		log.Fatal(err)
	}
	rule := quick(leases.Rule{Prefix: "leased", Idle: 50 * time.Millisecond, TTL: time.Second}, 100*time.Millisecond)
	if a.lent, err = leases.New(pool, a.c.Budget, leases.Config{Rules: []leases.Rule{rule}, Owner: a.name}); err != nil {
		log.Fatal(err)
	}
	pause, err := time.ParseDuration(os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	var wg sync.WaitGroup
	for kind, call := range map[string]func(ctx context.Context, id string) (map[string]int64, error){
		"charge": a.charge, "refund": a.refund, "hold": a.hold, "claim": a.claim, "token": a.token, "command": a.command, "read": a.read, "due": a.due, "wallet": a.wallet, "session": a.session, "lease": a.lease,
	} {
		wg.Go(func() { a.loop(ctx, pause, kind, call) })
	}
	wg.Wait()
	if err := a.lent.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(a.result); err != nil {
		log.Fatal(err)
	}
}

// loop makes calls of a kind until ctx ends, and one at least. One that was begun is seen to its
// end.
func (a *app) loop(ctx context.Context, pause time.Duration, kind string, call func(ctx context.Context, id string) (map[string]int64, error)) {
	for n := 0; ctx.Err() == nil || !a.answered(kind); n++ {
		began := time.Now()
		units, err := call(context.WithoutCancel(ctx), fmt.Sprintf("%s/%s/%d", a.name, kind, n))
		a.mu.Lock()
		a.result.Longest = max(a.result.Longest, time.Since(began))
		switch {
		case err == nil:
			a.result.Calls[kind]++
			for scope, n := range units {
				a.result.Units[scope] += n
			}
		case !metered.Retryable(err):
			a.result.Errors[kind+": "+err.Error()]++
		}
		a.mu.Unlock()
		time.Sleep(pause)
	}
}

// answered reports whether a call of the kind was committed, or any failed.
func (a *app) answered(kind string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.result.Calls[kind] > 0 || len(a.result.Errors) > 0
}

// limited is a limit that is never reached, so that it is judged all the same.
var limited = []budget.Limit{{Max: 1 << 40, Window: time.Minute}, told(budget.Lifetime(1<<40),
	budget.Threshold{Name: "some", Used: 200}, budget.Threshold{Name: "more", Used: 2000})}

func (a *app) in(ctx context.Context, f func(tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, a.pool, f)
}

func (a *app) charge(ctx context.Context, id string) (map[string]int64, error) {
	return map[string]int64{"charges": 3, "both": 1}, a.in(ctx, func(tx pgx.Tx) error {
		_, err := a.c.Budget.Charge(ctx, tx, budget.Charge{Scope: "charges", Amount: 3, Limits: limited, Note: budget.Note{Actor: id}},
			budget.Charge{Scope: "both", Amount: 1, Limits: limited})
		return err
	})
}

func (a *app) refund(ctx context.Context, id string) (map[string]int64, error) {
	return map[string]int64{"refunds": 2}, a.in(ctx, func(tx pgx.Tx) error {
		r, err := a.c.Budget.Charge(ctx, tx, budget.Charge{Scope: "refunds", Amount: 5, Limits: limited})
		if err != nil {
			return err
		}
		if _, err := a.c.Budget.Credit(ctx, tx, budget.Credit{Scope: "credits", Amount: 1}); err != nil {
			return err
		}
		_, err = a.c.Budget.Refund(ctx, tx, budget.Refund{Scope: "refunds", Seq: r.Entries[0].Seq, Amount: 3})
		return err
	})
}

// hold places two in a transaction of their own, and ends them in another: by this process or, when
// it is stopped between, by nobody.
func (a *app) hold(ctx context.Context, id string) (map[string]int64, error) {
	lines := func(n int64) []holds.Line {
		return []holds.Line{{Scope: "holds", Amount: n, Limits: limited}, {Scope: "both", Amount: 1, Limits: limited}}
	}
	if err := a.in(ctx, func(tx pgx.Tx) error {
		for suffix, n := range map[string]int64{"a": 4, "b": 6} {
			if _, err := a.c.Holds.Place(ctx, tx, placement{ID: id + suffix, Holder: "ann", Lines: lines(n), TTL: time.Minute}); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return map[string]int64{"holds": 4, "both": 1}, a.in(ctx, func(tx pgx.Tx) error {
		if _, err := a.c.Holds.Extend(ctx, tx, holds.Extend{IDs: []string{id + "a"}, By: time.Second}); err != nil {
			return err
		}
		if _, err := a.c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{id + "a"}, Holder: "ann", All: true}); err != nil {
			return err
		}
		_, err := a.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{id + "b"}})
		return err
	})
}

// claim claims a key that another process may have, and captures and refunds it.
func (a *app) claim(ctx context.Context, id string) (map[string]int64, error) {
	err := a.in(ctx, func(tx pgx.Tx) error {
		h, err := a.c.Holds.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "name", Value: "common"}, Holder: id, TTL: time.Minute})
		if err != nil {
			return err
		}
		if _, err := a.c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Entity: id, All: true}); err != nil {
			return err
		}
		_, err = a.c.Holds.Return(ctx, tx, holds.Return{IDs: []string{h.ID}, All: true})
		return err
	})
	if errors.Is(err, holds.ErrTaken) {
		err = nil
	}
	return nil, err
}

func (a *app) token(ctx context.Context, id string) (map[string]int64, error) {
	return nil, a.in(ctx, func(tx pgx.Tx) error {
		m, err := a.c.Tokens.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: id, TTL: time.Minute})
		if err != nil {
			return err
		}
		if _, err := a.c.Tokens.Inspect(ctx, tx, "p", id, m.Token.Reveal()); err != nil {
			return err
		}
		if _, err := a.c.Tokens.Consume(ctx, tx, "p", id, m.Token.Reveal()); err != nil {
			return err
		}
		if _, err := a.c.Tokens.Consume(ctx, tx, "p", id, m.Token.Reveal()); !errors.Is(err, tokens.ErrInvalid) {
			return fmt.Errorf("a token was spent twice: %w", err)
		}
		return nil
	})
}

// command runs one, and then meets its record.
func (a *app) command(ctx context.Context, id string) (map[string]int64, error) {
	for replayed := range 2 {
		out, err := metered.Do(ctx, a.c, metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: "commands", Amount: 2, Limits: limited}}},
			func(ctx context.Context, tx *metered.Tx) (string, error) {
				if _, err := tx.Place(ctx, placement{ID: id, Lines: []holds.Line{{Scope: "placed", Amount: 1, Limits: limited}}, TTL: time.Minute}, nil); err != nil {
					return "", err
				}
				if err := tx.Charge(budget.Charge{Scope: "both", Amount: 1, Limits: limited}); err != nil {
					return "", err
				}
				_, err := tx.Enqueue(ctx, note{id}, &jobs.Options{Key: id})
				return id, err
			})
		if err != nil {
			return nil, err
		}
		if out.Replayed != (replayed == 1) || out.Result != id {
			return nil, fmt.Errorf("attempt %d: replayed %v, result %q", replayed, out.Replayed, out.Result)
		}
	}
	return map[string]int64{"commands": 2, "both": 1}, nil
}

func (a *app) read(ctx context.Context, _ string) (map[string]int64, error) {
	if _, err := a.c.Budget.Usage(ctx, a.pool, budget.Query{Scope: "both", Window: time.Minute}, budget.Query{Scope: "both"}); err != nil {
		return nil, err
	}
	if _, err := a.c.Budget.Check(ctx, a.pool, budget.Charge{Scope: "both", Amount: 1, Limits: limited}); err != nil {
		return nil, err
	}
	_, err := a.c.Holds.List(ctx, a.pool, holds.Filter{Holder: "ann"})
	time.Sleep(10 * time.Millisecond)
	return nil, err
}

// due leaves holds to fall due, for whoever comes next, and sweeps.
func (a *app) due(ctx context.Context, id string) (map[string]int64, error) {
	if err := a.in(ctx, func(tx pgx.Tx) error {
		_, err := a.c.Holds.Place(ctx, tx, placement{ID: id, TTL: time.Second, Lines: []holds.Line{{Scope: "due", Amount: 1, Limits: limited}}})
		return err
	}); err != nil {
		return nil, err
	}
	_, err := a.c.Holds.Sweep(ctx, a.pool, holds.SweepOptions{})
	time.Sleep(20 * time.Millisecond)
	return nil, err
}

// wallet grants a lot that lasts and one that ends at once, and draws, refunds and revokes of
// wallets that all processes have.
func (a *app) wallet(ctx context.Context, id string) (map[string]int64, error) {
	err := a.in(ctx, func(tx pgx.Tx) error {
		for reference, g := range map[string]wallet.Grant{"lasting/": {Amount: 10}, "ending/": ending(wallet.Grant{Amount: 5}, 50*time.Millisecond)} {
			g.Wallet, g.Reference = "wallet", reference+id
			if _, err := a.book.Grant(ctx, tx, g); err != nil {
				return err
			}
		}
		seq, err := drawn(ctx, tx, a.c.Budget, a.book, "wallet", 8)
		if err != nil {
			return err
		}
		if _, err := a.c.Budget.Refund(ctx, tx, budget.Refund{Scope: "wallet", Seq: seq, Amount: 2}); err != nil {
			return err
		}
		_, err = a.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "wallet", Reference: "lasting/" + id, Amount: 1})
		return err
	})
	if err != nil {
		return nil, err
	}
	if _, err = a.book.Sweep(ctx, a.pool, wallet.SweepOptions{Batch: 1000}); err == nil {
		_, err = a.book.Balance(ctx, a.pool, "wallet")
	}
	if metered.Retryable(err) { // the upgrade ended it, and the draw was committed before
		err = nil
	}
	return map[string]int64{"wallet": 6}, err
}

// session reserves, and settles less. Opening it again finds it settled.
func (a *app) session(ctx context.Context, id string) (map[string]int64, error) {
	lines := func(n int64) []holds.Line { return []holds.Line{{Scope: "sessions", Amount: n, Limits: limited}} }
	for again := range 2 {
		s, err := metered.Open[string](ctx, a.c, metered.Reservation{ID: id, Lines: lines(9)})
		if err != nil {
			return nil, err
		}
		if s.Finished() != (again == 1) {
			return nil, fmt.Errorf("opened %d times, finished: %v", again+1, s.Finished())
		}
		if !s.Finished() {
			if _, err := s.Settle(ctx, metered.Cost{Lines: lines(7)}, nil); err != nil {
				return nil, err
			}
		}
		s.Close()
	}
	return map[string]int64{"sessions": 7}, nil
}

// lease spends of slices, of which some end with the process that opened them.
func (a *app) lease(ctx context.Context, _ string) (map[string]int64, error) {
	return map[string]int64{"leased": 1}, a.in(ctx, func(tx pgx.Tx) error {
		_, err := a.lent.Charge(ctx, tx, budget.Charge{Scope: "leased", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1 << 40)}})
		return err
	})
}
