package metered_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

type transcript struct {
	Seconds int64 `json:"seconds"`
}

// reserve returns the reservation for a film of unknown length.
func reserve(id string) metered.Reservation {
	return metered.Reservation{
		ID: id, Tenant: "ann", Name: "transcribe", Input: "film.mp4",
		Lines: []holds.Line{{Scope: "seconds/ann", Amount: 600, Limits: []budget.Limit{budget.Lifetime(1000)}}},
	}
}

// Work is reserved, done and settled. The same id again is answered by the record.
func ExampleOpen() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	transcribe := func() error {
		s, err := metered.Open[transcript](ctx, client, reserve("job-1"))
		if err != nil {
			return err
		}
		defer s.Close()
		if s.Finished() {
			fmt.Println("it was done before:", s.Outcome().Result.Seconds)
			return nil
		}
		fmt.Println("reserved", s.Hold().Lines[0].Open)
		_, err = metered.Open[transcript](ctx, client, reserve("job-1"))
		fmt.Println("at the same time:", errors.Is(err, metered.ErrRunning))

		var seconds int64
		for s.Context().Err() == nil && seconds < 240 { // the work, for as long as it is covered
			seconds++
		}
		out, err := s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: "seconds/ann", Amount: seconds}}},
			func(context.Context, *metered.Tx) (transcript, error) { return transcript{seconds}, nil })
		if err == nil {
			fmt.Println("charged", out.Holds[0].Lines[0].Captured)
		}
		return err
	}
	for range 2 {
		if err := transcribe(); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// reserved 600
	// at the same time: true
	// charged 240
	// it was done before: 240
}

// More units were used than were held. Over decides: the surplus is refused, charged if it fits, or charged as far as
// the limit has room for it.
func ExampleSession_Settle() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	s, err := metered.Open[any](ctx, client, reserve("job-1"))
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	used := metered.Cost{Lines: []holds.Line{{Scope: "seconds/ann", Amount: 1200}}}
	_, err = s.Settle(ctx, used, nil)
	fmt.Println(err)
	used.Over = holds.OverIfFits
	_, err = s.Settle(ctx, used, nil)
	fmt.Println(metered.Code(err))
	used.Over = holds.OverUpTo
	out, err := s.Settle(ctx, used, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("charged", out.Holds[0].Lines[0].Captured)
	// Output:
	// holds: the amount exceeds the open units: scope "seconds/ann": requested 1200, held 600
	// budget_exceeded
	// charged 1000
}

// Nothing was used: the reserved units are free, and the same id can be opened again.
func ExampleSession_Cancel() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	for range 2 {
		s, err := metered.Open[any](ctx, client, reserve("job-1"))
		if err != nil {
			log.Fatal(err)
		}
		defer s.Close()
		if err := s.Cancel(ctx, "no such film"); err != nil {
			log.Fatal(err)
		}
	}
	usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "seconds/ann"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(usage[0].Used, usage[0].Held)
	// Output: 0 0
}

// The process dies. The held units are free when the hold falls due, swept or not, but for the minimum, which the
// provider bills in any case. Then the same id runs anew.
func ExampleReservation_minimum() {
	ctx := context.Background()
	pool, setClock, done := exampleDatabaseAt(time.Date(2026, time.November, 23, 12, 0, 0, 0, time.UTC))
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	request := reserve("job-1")
	request.Lines[0].AtLeast = 30
	request.TTL, request.Grace = 20*time.Second, 10*time.Second
	shows := func(what string) {
		usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "seconds/ann"})
		check(err)
		fmt.Println(what, usage[0].Used, "used,", usage[0].Held, "held")
	}
	s, err := metered.Open[any](ctx, client, request)
	check(err)
	shows("opened:")
	s.Close() // as a process that dies: nothing is sent
	shows("dead:")
	setClock(time.Date(2026, time.November, 23, 12, 0, 30, 0, time.UTC))
	shows("30 seconds later:")
	s, err = metered.Open[any](ctx, client, request)
	check(err)
	defer s.Close()
	shows("opened anew:")
	// Output:
	// opened: 0 used, 600 held
	// dead: 0 used, 600 held
	// 30 seconds later: 30 used, 0 held
	// opened anew: 30 used, 600 held
}

// The result of the work arrives in another process, as a webhook does. It settles the session by the operation's id.
func ExampleResume() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	started, err := metered.Open[transcript](ctx, client, reserve("job-1"))
	if err != nil {
		log.Fatal(err)
	}
	defer started.Close()

	arrived := func(id string, seconds int64) error {
		s, err := metered.Resume[transcript](ctx, client, metered.Reservation{ID: id, Tenant: "ann", Name: "transcribe"})
		if err != nil {
			return err
		}
		defer s.Close()
		out, err := s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: "seconds/ann", Amount: seconds}}},
			func(context.Context, *metered.Tx) (transcript, error) { return transcript{seconds}, nil })
		if err == nil {
			fmt.Println("charged", out.Holds[0].Lines[0].Captured, "replayed", out.Replayed)
		}
		return err
	}
	fmt.Println(arrived("job-1", 240))
	fmt.Println(arrived("job-1", 240)) // the webhook comes twice
	fmt.Println(errors.Is(arrived("job-2", 240), metered.ErrLost))
	// Output:
	// charged 240 replayed false
	// <nil>
	// charged 240 replayed true
	// <nil>
	// true
}
