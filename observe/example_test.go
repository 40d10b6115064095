package observe_test

import (
	"context"
	"fmt"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/observe"
)

// printer prints the outcomes of commands, and the limits that refuse.
type printer struct{}

func (printer) Start(ctx context.Context, op observe.Op) (context.Context, func(observe.End)) {
	if op.Work != observe.Command {
		return ctx, nil
	}
	began := time.Now()
	return ctx, func(e observe.End) {
		fmt.Println(op.Name, e.Outcome, e.RoundTrips, time.Since(began) > 0)
	}
}

func (printer) Event(_ context.Context, e observe.Event) {
	if e.Kind == observe.LimitRefused {
		fmt.Println("refused by", e.Name)
	}
}

func ExampleObserver() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{Config: budget.Config{Observer: printer{}}})
	if err != nil {
		panic(err)
	}
	for _, id := range []string{"request-1", "request-1", "request-2"} { // the first one twice
		_, _ = metered.Do[any](ctx, client, metered.Command{
			ID: id, Name: "upload",
			Charges: []budget.Charge{{Scope: "org/acme", Amount: 60, Limits: []budget.Limit{budget.PerWindow(100, time.Hour).Named("hourly")}}},
		}, nil)
	}
	// Output:
	// upload committed 1 true
	// upload replayed 2 true
	// refused by hourly
	// upload refused 1 true
}
