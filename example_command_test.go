package metered_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

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
			return nil, tx.RefundCharge(budget.Refund{Scope: tried.Scope, Seq: tried.Seq, Amount: tried.Amount})
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
		return metered.Do(ctx, client, metered.Command{ID: request, Namespace: visitor, Name: "claim", Input: "ann"},
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
		seconds, ok := taken.RetryAfterSeconds()
		fmt.Println("taken, may be free within 10 minutes:", ok && seconds <= 600)
	}
	_, err = metered.Do(ctx, client, metered.Command{ID: "request-2", Input: 1, Namespace: "visitor-1", Name: "confirm"},
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
				return nil // what was written before is committed all the same
			}
			return err
		}))
	}
	// Output:
	// upload of 800 is refused: false
	// upload of 300 is refused: true
}

// What became of a request, for whoever lost the answer and not the id.
func ExampleClient_Lookup() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	_, err = metered.Do(ctx, client, metered.Command{
		ID: "request-1", Namespace: "ann", Charges: []budget.Charge{{Scope: "org/acme", Amount: 800}},
	}, func(context.Context, *metered.Tx) (string, error) { return "upload 1", nil })
	check(err)

	op, err := client.Lookup(ctx, pool, "ann", "request-1")
	check(err)
	fmt.Println(string(op.Result), op.Receipt.Entries[0].Scope, op.Receipt.Entries[0].Amount)
	_, err = client.Lookup(ctx, pool, "ben", "request-1") // ids are a namespace's own
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
