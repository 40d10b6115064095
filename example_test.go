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
			ID:        operation, // chosen by whoever asks: the same id never runs twice
			Namespace: "ann",     // whose ids they are: who is signed in, never what the client says
			Name:      "upload",
			Input:     size,
			Token:     &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: grant.Token.Reveal()},
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
	out, err := upload("request-2", 800)
	fmt.Println("upload", out.Result, "replayed:", out.Replayed, "error:", err)
	out, err = upload("request-2", 800)
	fmt.Println("upload", out.Result, "replayed:", out.Replayed, "error:", err)
	_, err = upload("request-3", 100)
	fmt.Println("error:", err)
	// Output:
	// refused: 1000 of 1000 available per 1h0m0s
	// upload 1 replayed: false error: <nil>
	// upload 1 replayed: true error: <nil>
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
		credit := []budget.Limit{budget.Prepaid()} // nothing is spent that was not credited
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
