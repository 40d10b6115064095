package metered_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// Thumbnail is a job for River.
type Thumbnail struct {
	UploadID int64 `json:"upload_id"`
}

func (Thumbnail) Kind() string { return "thumbnail" }

func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()

	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil { // once
		log.Fatal(err)
	}
	if _, err := pool.Exec(ctx, `create table uploads (id bigint generated always as identity primary key, size bigint)`); err != nil {
		log.Fatal(err)
	}
	riverClient, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, // for jobs with keys
	})
	if err != nil {
		log.Fatal(err)
	}
	client, err := metered.New(pool, metered.Config{River: riverClient})
	if err != nil {
		log.Fatal(err)
	}

	// Somewhere, the user is granted one upload.
	var grant tokens.Minted
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		grant, err = client.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	// Redeeming it charges the organisation, stores the upload and enqueues a job.
	upload := func(operation string, size int64) (metered.Outcome[int64], error) {
		return metered.Do(ctx, client, metered.Command{
			ID:     operation, // chosen by whoever asks: the same id never runs twice
			Tenant: "ann",     // the owner of the id: the signed-in user, whatever the client says
			Name:   "upload",
			Input:  size,
			Token:  &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: grant.Token.Reveal()},
			Charges: []budget.Charge{{Scope: "org/acme", Amount: size, Limits: []budget.Limit{
				budget.PerWindow(1_000, time.Hour),
				budget.PerWindow(5_000, 24*time.Hour),
			}}},
		}, func(ctx context.Context, tx *metered.Tx) (id int64, err error) {
			err = tx.QueryRow(ctx, `insert into uploads (size) values ($1) returning id`, size).Scan(&id)
			if err != nil {
				return 0, err
			}
			_, err = tx.Enqueue(ctx, Thumbnail{UploadID: id}, nil)
			return id, err
		})
	}

	_, err = upload("request-1", 1_200)
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		r := exceeded.Refusals[0]
		fmt.Printf("refused: %d of %d available per %v\n", r.Available, r.Limit.Max, r.Limit.Window)
	}
	out, err := upload("request-2", 800) // of the one before only a number of the sequence is gone
	fmt.Println("upload", out.Result, "replayed:", out.Replayed, "error:", err)
	out, err = upload("request-2", 800)
	fmt.Println("upload", out.Result, "replayed:", out.Replayed, "error:", err)
	_, err = upload("request-3", 100)
	fmt.Println("error:", err)
	// Output:
	// refused: 1000 of 1000 available per 1h0m0s
	// upload 2 replayed: false error: <nil>
	// upload 2 replayed: true error: <nil>
	// error: tokens: the token is not valid
}

// A transfer charges one scope and credits another, in one command.
func ExampleTx_Credit() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}

	topUp := func(id, account string, cents int64) error {
		_, err := metered.Do(ctx, client, metered.Command{ID: id, Name: "top-up", Input: []any{account, cents}},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Credit(budget.Credit{Scope: account, Amount: cents})
			})
		return err
	}
	transfer := func(id, from, to string, cents int64) error {
		credit := []budget.Limit{budget.Prepaid(0)} // nothing is spent that was not credited
		_, err := metered.Do(ctx, client, metered.Command{
			ID: id, Name: "transfer", Input: to, Charges: []budget.Charge{{Scope: from, Amount: cents, Limits: credit}},
		}, func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Credit(budget.Credit{Scope: to, Amount: cents})
		})
		return err
	}

	fmt.Println(topUp("payment-1", "ann", 100), topUp("payment-1", "ann", 100)) // announced twice
	fmt.Println(transfer("transfer-1", "ann", "ben", 70), transfer("transfer-1", "ann", "ben", 70))
	fmt.Println(metered.Code(transfer("transfer-2", "ann", "ben", 31)))
	usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "ann"}, budget.Query{Scope: "ben"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("ann has", -usage[0].Used, "and ben", -usage[1].Used)
	// Output:
	// <nil> <nil>
	// <nil> <nil>
	// budget_exceeded
	// ann has 30 and ben 70
}

// Two wrong passwords an hour. The attempt is charged before the command runs and stays
// when it fails; one that succeeds gives its own back.
func ExampleCommand_sticky() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	errPassword := errors.New("wrong password")
	login := func(user, password string) {
		out, err := metered.Do(ctx, client, metered.Command{
			ID: metered.NewID(), Input: 1, Name: "login",
			Sticky: []budget.Charge{{
				Scope: budget.ScopeKey("login", user, ""), Amount: 1, Limits: []budget.Limit{budget.PerWindow(2, time.Hour)},
			}},
		}, func(_ context.Context, tx *metered.Tx) (any, error) {
			if password != "right" {
				return nil, errPassword
			}
			tried := tx.Sticky.Entries[0]
			return nil, tx.Refund(budget.Refund{Scope: tried.Scope, Seq: tried.Seq, Amount: tried.Amount})
		})
		switch {
		case errors.Is(err, metered.ErrTooManyAttempts): // 429
			fmt.Println("too many attempts")
		case err != nil:
			fmt.Printf("%v, attempts left: %d\n", err, out.Sticky.Entries[0].Standings[0].Available)
		default:
			fmt.Println("welcome")
		}
	}
	login("ann", "right")
	login("ann", "wrong")
	login("ann", "right")
	login("ann", "wrong")
	login("ann", "right")
	// Output:
	// welcome
	// wrong password, attempts left: 1
	// welcome
	// wrong password, attempts left: 0
	// too many attempts
}

// A user name is claimed while somebody signs up, and confirmed with the user's row. Each
// is a command: sent again it is answered again.
func ExampleTx_Claim() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	claim := func(request, visitor string) (metered.Outcome[any], error) {
		return metered.Do(ctx, client, metered.Command{ID: request, Tenant: visitor, Name: "claim", Input: "ann"},
			func(ctx context.Context, tx *metered.Tx) (any, error) {
				_, err := tx.Claim(ctx, holds.Claim{
					Key: holds.Key{Type: "user name", Value: "ann"}, Holder: visitor, TTL: 10 * time.Minute,
				}, nil)
				return nil, err
			})
	}

	out, err := claim("request-1", "visitor-1")
	check(err)
	claimed := out.Holds[0]
	fmt.Println(claimed.Claim.Value, "is", claimed.State)
	_, err = claim("request-1", "visitor-2")
	var taken *holds.TakenError
	if errors.As(err, &taken) { // 409
		fmt.Println("taken, may be free within 10 minutes:", !taken.Confirmed && taken.RetryAfter <= 10*time.Minute)
	}
	_, err = metered.Do(ctx, client, metered.Command{ID: "request-2", Input: 1, Tenant: "visitor-1", Name: "confirm"},
		func(_ context.Context, tx *metered.Tx) (any, error) {
			// The user's row would be written here, through tx.
			return nil, tx.Capture(holds.Capture{IDs: []string{claimed.ID}, All: true, Holder: "visitor-1", Entity: "user/1"})
		})
	fmt.Println("confirmed:", err == nil)
	_, err = claim("request-2", "visitor-2")
	fmt.Println(err)
	// Output:
	// ann is held
	// taken, may be free within 10 minutes: true
	// confirmed: true
	// holds: the claim is taken: confirmed
}

// A command inside a transaction of the caller's, where it is the last thing. If it is
// refused the transaction is as it was before, and the caller decides.
func ExampleDoTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	for _, size := range []int64{800, 300} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			id := fmt.Sprint("upload of ", size)
			// Your own writes, of this and of other things.
			_, err := metered.DoTx[any](ctx, client, tx, metered.Command{
				ID: id, Charges: []budget.Charge{{Scope: "org/acme", Amount: size, Limits: []budget.Limit{budget.PerWindow(1_000, time.Hour)}}},
			}, nil)
			fmt.Println(id, "is refused:", err != nil)
			if errors.Is(err, budget.ErrExceeded) {
				return nil // the rows that were written before are committed all the same
			}
			return err
		}))
	}
	// Output:
	// upload of 800 is refused: false
	// upload of 300 is refused: true
}

// A caller that lost the answer and kept the id looks up the outcome of its request.
func ExampleClient_Lookup() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = metered.Do(ctx, client, metered.Command{
		ID: "request-1", Tenant: "ann", Charges: []budget.Charge{{Scope: "org/acme", Amount: 800}},
	}, func(context.Context, *metered.Tx) (string, error) { return "upload 1", nil })
	check(err)

	op, err := client.Lookup(ctx, pool, "ann", "request-1")
	check(err)
	fmt.Println(string(op.Result), op.Receipt.Entries[0].Scope, op.Receipt.Entries[0].Amount)
	_, err = client.Lookup(ctx, pool, "ben", "request-1") // ids are a tenant's own
	fmt.Println(metered.Code(err))
	// Output:
	// "upload 1" org/acme 800
	// operation_unknown
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// Best effort: another process hears of payments of 1,000 and more once they have committed.
func ExampleClient_Listen() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{NotifyChargesFrom: 1_000})
	check(err)
	pay := func(id string, amount int64) {
		_, err := metered.Do[any](ctx, client, metered.Command{ID: id, Charges: []budget.Charge{{
			Scope: "wallet/ann", Amount: amount, Limits: []budget.Limit{budget.PerWindow(5_000, time.Hour)},
		}}}, nil)
		fmt.Println(id, err == nil)
	}
	enough := errors.New("enough")
	err = client.Listen(ctx, pool, holds.ListenOptions{}, func(_ context.Context, n metered.CommandNotice) error {
		if n.Missed { // first of all: read the entries that are there (Ledger.Entries), then follow
			pay("small", 10)
			pay("refused", 9_000)
			pay("large", 2_000)
			return nil
		}
		fmt.Println("heard:", n.ID, n.Charges[0].Scope, n.Charges[0].Amount)
		return enough
	})
	fmt.Println(err)
	// Output:
	// small true
	// refused false
	// large true
	// heard: large wallet/ann 2000
	// enough
}

// Released is a hold's release, for a worker.
type Released struct {
	Hold, Holder, Reason string
}

// Kind is River's name for it.
func (Released) Kind() string { return "released" }

// Exactly once: the transition enqueues a job in its own transaction. The job is there if and
// only if the transition is, and its key keeps it one.
func ExampleClient_exactlyOnce() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	worked := make(chan string)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[Released]) error {
		worked <- fmt.Sprintf("%s of %s is free: %s", job.Args.Hold, job.Args.Holder, job.Args.Reason)
		return nil
	}))
	queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{"default": {MaxWorkers: 1}},
	})
	check(err)
	enqueuer, err := jobs.New(queue, jobs.Config{})
	check(err)
	tell := func(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
		if t.Kind != holds.EventReleased {
			return nil
		}
		_, err := enqueuer.Enqueue(ctx, tx, Released{t.Hold.ID, t.Hold.Holder, t.Note.Reason},
			&jobs.Options{Key: fmt.Sprintf("hold/%s/%d", t.Hold.ID, t.Hold.Version)})
		return err
	}
	client, err := metered.New(pool, metered.Config{River: queue, Holds: holds.Config{Subscribers: []holds.Subscriber{tell}}})
	check(err)
	check(queue.Start(ctx))
	defer func() { check(queue.Stop(ctx)) }()

	_, err = metered.Do(ctx, client, metered.Command{ID: "hold", Input: "22B"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		return tx.Place(ctx, holds.Placement{ID: "seat 22B", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{{Scope: "seat/22B", Amount: 1}}}, nil)
	})
	check(err)
	for range 2 { // and once more, as after a lost answer
		_, err = metered.Do(ctx, client, metered.Command{ID: "release", Input: "22B"}, func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Release(holds.Release{IDs: []string{"seat 22B"}, Note: budget.Note{Reason: "changed their mind"}})
		})
		check(err)
	}
	fmt.Println(<-worked)
	// Output: seat 22B of ann is free: changed their mind
}
