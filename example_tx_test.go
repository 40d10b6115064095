package metered_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// A command that knows its writes beforehand declares them, and takes one round trip. Done again, it answers what it did.
func ExampleCommand_statements() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = pool.Exec(ctx, "create table messages (id text primary key, body text not null)")
	check(err)
	post := func(id, body string) {
		writes := &pgx.Batch{}
		writes.Queue("insert into messages values ($1, $2)", id, body)
		out, err := metered.Do[any](ctx, client, metered.Command{
			ID: id, Name: "post", Input: body, Statements: writes,
			Charges: []budget.Charge{{Scope: "ann/messages", Amount: 1, Limits: []budget.Limit{budget.PerWindow(2, time.Hour)}}},
		}, nil)
		switch {
		case errors.Is(err, budget.ErrExceeded):
			fmt.Println(id, "is too much")
			return
		case err != nil:
			log.Fatal(err)
		}
		fmt.Println(id, "is posted, again:", out.Replayed)
	}
	post("m1", "hello")
	post("m1", "hello")
	post("m2", "world")
	post("m3", "!")
	var n int
	check(pool.QueryRow(ctx, "select count(*) from messages").Scan(&n))
	fmt.Println(n, "messages")
	// Output:
	// m1 is posted, again: false
	// m1 is posted, again: true
	// m2 is posted, again: false
	// m3 is too much
	// 2 messages
}

// Stripe delivers an event twice, late, and in the wrong order. Each takes effect at most once, and none after a newer
// one of its subscription: what was deleted stays deleted.
func ExampleOrder() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = pool.Exec(ctx, "create table subscriptions (id text primary key, status text not null)")
	check(err)
	type event struct {
		ID, Subscription, Status string
		Created                  int64
	}
	receive := func(e event) {
		_, err := metered.Do(ctx, client, metered.Command{
			ID: e.ID, Tenant: "stripe", Name: "subscription", Input: e,
			Newest: metered.Order{Key: e.Subscription, At: time.Unix(e.Created, 0)},
		}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Exec(ctx, `insert into subscriptions values ($1, $2)
				on conflict (id) do update set status = excluded.status`, e.Subscription, e.Status)
			return nil, err
		})
		if errors.Is(err, metered.ErrStale) {
			fmt.Println(e.ID, "came too late: answer 200")
			return
		}
		check(err) // answer 500: Stripe sends it again
		fmt.Println(e.ID, "took effect: answer 200")
	}
	created := event{"evt_1", "sub_1", "active", 1_793_000_000}
	updated := event{"evt_2", "sub_1", "past_due", 1_793_000_100}
	deleted := event{"evt_3", "sub_1", "canceled", 1_793_000_200}
	for _, e := range []event{created, deleted, deleted, updated, updated} {
		receive(e)
	}
	var status string
	check(pool.QueryRow(ctx, "select status from subscriptions").Scan(&status))
	fmt.Println(status)
	// Output:
	// evt_1 took effect: answer 200
	// evt_3 took effect: answer 200
	// evt_3 took effect: answer 200
	// evt_2 came too late: answer 200
	// evt_2 came too late: answer 200
	// canceled
}

// In development a function that writes by another connection than its own is told so.
func ExampleNoOtherConnections() {
	ctx := context.Background()
	database, done := exampleDatabase()
	defer done()
	cfg := database.Config()
	check(metered.NoOtherConnections(cfg))
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	check(err)
	defer pool.Close()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = metered.Do(ctx, client, metered.Command{ID: "r-1", Tenant: "ann", Name: "save"},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := pool.Exec(ctx, "create table notes (id text)") // tx.Exec is right
			return nil, err
		})
	fmt.Println(metered.Code(err))
	// Output: nested_command
}

// A session opens and settles in transactions that write the caller's own rows.
func ExampleSession_SettleTx() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = pool.Exec(ctx, "create table films (id text primary key, seconds bigint)")
	check(err)

	var s *metered.Session[any]
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		if _, err = tx.Exec(ctx, "insert into films (id) values ('job-1')"); err != nil {
			return err
		}
		s, err = metered.OpenTx[any](ctx, client, tx, reserve("job-1"))
		return err
	}))
	defer s.Close()
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "update films set seconds = 240 where id = 'job-1'"); err != nil {
			return err
		}
		_, err := s.SettleTx(ctx, tx, metered.Cost{Lines: []holds.Line{{Scope: "seconds/ann", Amount: 240}}}, nil)
		return err
	}))
	op, err := client.Lookup(ctx, pool, "ann", "job-1")
	check(err)
	fmt.Println("charged", op.Holds[0].Lines[0].Captured)
	// Output: charged 240
}

// Support refunds an operation and knows its id: the record lists the charges, and the units that a hold captured.
// The refund is a command, so it can be sent again. The refunds of one charge never exceed it.
func ExampleTx_Refund() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	seconds := budget.Query{Scope: "seconds/ann"}

	// The operation: a job of unknown length, that costs another unit when it is done.
	s, err := metered.Open[any](ctx, client, reserve("job-1"))
	check(err)
	defer s.Close()
	_, err = s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: "seconds/ann", Amount: 240}}},
		func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Charge(budget.Charge{Scope: "seconds/ann", Amount: 1})
		})
	check(err)

	giveBack := func(request, operation string) error {
		op, err := client.Lookup(ctx, pool, "ann", operation)
		if err != nil {
			return err
		}
		_, err = metered.Do(ctx, client, metered.Command{ID: request, Tenant: "support", Name: "refund", Input: operation},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				for _, charged := range op.Receipt.Entries {
					if err := tx.Refund(budget.Refund{Scope: charged.Scope, Seq: charged.Seq, All: true}); err != nil {
						return nil, err
					}
				}
				for _, hold := range op.Holds {
					if err := tx.Return(holds.Return{Tenant: hold.Tenant, IDs: []string{hold.ID}, All: true}); err != nil {
						return nil, err
					}
				}
				return nil, nil
			})
		return err
	}
	for _, request := range []string{"refund", "refund", "dispute"} {
		err := giveBack(request, "job-1")
		usage, lost := client.Budget.Usage(ctx, pool, seconds)
		check(lost)
		fmt.Printf("%s: %d used, nothing was left: %t\n", request, usage[0].Used, errors.Is(err, budget.ErrRefundExceeds))
	}
	// Output:
	// refund: 0 used, nothing was left: false
	// refund: 0 used, nothing was left: false
	// dispute: 0 used, nothing was left: true
}

// A table is held for ten minutes. Ten more cost a unit, and commit with it, or neither does.
func ExampleTx_Extend() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = metered.Do(ctx, client, metered.Command{ID: "table-7", Tenant: "ann", Holds: []holds.Placement{{
		ID: "table-7", TTL: 10 * time.Minute, Lines: []holds.Line{{Scope: "table/7", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}},
	}}}, func(context.Context, *metered.Tx) (any, error) { return nil, nil })
	check(err)
	longer := func(request string) {
		out, err := metered.Do(ctx, client, metered.Command{ID: request, Tenant: "ann", Name: "longer", Input: "table-7"},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, errors.Join(
					tx.Charge(budget.Charge{Scope: "extensions/ann", Amount: 1, Limits: []budget.Limit{budget.Per(1, budget.Day, time.UTC, time.Time{})}}),
					tx.Extend(holds.Extend{IDs: []string{"table-7"}, By: 10 * time.Minute}))
			})
		if err != nil {
			fmt.Println(metered.Code(err))
			return
		}
		fmt.Println("held for", out.Holds[0].Deadline.Sub(out.Holds[0].PlacedAt))
	}
	longer("longer-1")
	longer("longer-2")
	// Output:
	// held for 20m0s
	// budget_exceeded
}

// A command mints an invitation. Sent again, it answers with the same link, which is stored nowhere.
func ExampleTx_Secret() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	key := []byte("\x8f\x1d\x6b\x0a\x93\xe2\x4c\x75\xb1\xf0\xa2\xd3\x5e\x67\x9c\x48\x10\x29\x38\x47\x56\xac\xbe\xdf\x0f\x1e\x2d\x3c\x4b\x5a\x69\x78") // from your secret store
	client, err := metered.New(pool, metered.Config{SecretKey: key, TokenPrefix: "acme_invite"})
	check(err)
	invite := func(request string) (tokens.Token, error) {
		_, err := metered.Do(ctx, client, metered.Command{ID: request, Tenant: "ann", Name: "invite", Input: "bob@example.com"},
			func(ctx context.Context, tx *metered.Tx) (any, error) {
				secret, err := tx.Secret("invitation")
				if err != nil {
					return nil, err
				}
				_, err = client.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "invite", Subject: "bob@example.com", Secret: secret})
				return nil, err
			})
		if err != nil {
			return tokens.Token{}, err
		}
		secret, err := client.Secret("ann", request, "invitation") // that of the first time
		if err != nil {
			return tokens.Token{}, err
		}
		return client.Tokens.Token(secret)
	}
	first, err := invite("request-1")
	check(err)
	again, err := invite("request-1")
	check(err)
	fmt.Println("the same:", first.Digest() == again.Digest())
	// Output: the same: true
}

// A report costs 30 units of prepaid credit, which the command declares, and the units that its function adds. The
// same command, sent again, returns the draws of the first run.
func ExampleTx_Charge_lots() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	book, err := wallet.New(client.Budget, wallet.Config{Priorities: map[string]int{"promotional": 5, "paid": 10}})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for category, amount := range map[string]int64{"promotional": 25, "paid": 13} {
			if _, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: amount, Category: category, Ends: wallet.After(30 * 24 * time.Hour)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}

	command := metered.Command{ID: "report/17", Input: "2026-11", Charges: []budget.Charge{
		book.Charge("ann", 30, budget.Per(100, budget.Month, time.UTC, time.Time{})), // and the plan's cap of the month
	}}
	write := func(ctx context.Context, tx *metered.Tx) (string, error) {
		// It comes before the charges of the command: its declared units must be left.
		draw := book.Charge("ann", 8)
		draw.Lots = true
		return "report", tx.Charge(draw)
	}
	for range 2 {
		out, err := metered.Do(ctx, client, command, write)
		if err != nil {
			log.Fatal(err)
		}
		declared, drawn := out.Receipt.Entries[0], out.Receipt.Entries[1]
		fmt.Println(out.Replayed, declared.Amount, drawn.Amount, drawn.Lots[0].Category)
	}
	// Output:
	// false 30 8 promotional
	// true 30 8 promotional
}

// An import of 60 rows writes as many as the shop and its plan still admit, and a repetition gets the same answer.
func ExampleTx_Charge_upTo() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	rows := func(scope string, most int64) budget.Charge {
		return budget.Charge{Scope: scope, Amount: 60, UpTo: true, Limits: []budget.Limit{budget.Lifetime(most)}}
	}
	for range 2 {
		out, err := metered.Do(ctx, client, metered.Command{ID: "import/1", Input: 60}, func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Charge(rows("shop/7", 25), rows("plan/acme", 40))
		})
		check(err)
		for _, e := range out.Receipt.Entries {
			fmt.Println(e.Scope, e.Amount, out.Replayed)
		}
	}
	// Output:
	// shop/7 25 false
	// plan/acme 25 false
	// shop/7 25 true
	// plan/acme 25 true
}

// A deployment looks at the schema before a new build may serve. Here somebody has run `grant execute on all
// functions` on it. Migrate takes that back, for functions alone: it leaves differences of tables and indexes to you.
func ExampleValidate() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, `grant execute on function metered.clock() to public`)
	check(err)

	report, err := metered.Validate(ctx, pool, "")
	check(err)
	switch err := report.Err(); {
	case errors.Is(err, metered.ErrSchemaDiffers):
		for _, d := range report.Differences {
			fmt.Println(d.Object, d.Problem)
		}
	default: // budget.ErrNotMigrated: migrate first; ErrSchemaVersion: this build is too old
		check(err)
	}
	repaired, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	check(err)
	fmt.Println("repaired:", repaired.Repaired[0].Object)
	report, err = metered.Validate(ctx, pool, "")
	check(err)
	fmt.Println("fit to serve:", report.Err() == nil)
	// Output:
	// function clock() can be executed by everybody
	// repaired: function clock()
	// fit to serve: true
}

// A pool for calls with short deadlines: its connections are warm before they are used, two are made before anybody asks, and a
// call that is cancelled keeps its connection.
func ExampleWarm() {
	ctx := context.Background()
	database, done := exampleDatabase()
	defer done()
	config, err := pgxpool.ParseConfig(database.Config().ConnString())
	if err != nil {
		log.Fatal(err)
	}
	config.MinIdleConns = 2
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 5 * time.Second}
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	out, err := metered.Do(ctx, client, metered.Command{ID: "warm"}, func(context.Context, *metered.Tx) (string, error) { return "done", nil })
	fmt.Println(out.Result, err)
	// Output: done <nil>
}
