package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
)

var pageFigures = []figure{
	{
		name: "page_open_vs_alone", unit: "times the rate", goal: atLeast(0.97),
		meaning: "commands/s over 10,000 scopes with a million entries, 8 clients, with the console's overview open, against nobody looking",
		measure: pageOpen,
	},
}

const (
	pageScopes  = 10_000
	pageClients = 8
)

// pageOpen measures the same load on the same database, in turns, with a viewer of the overview and without. A turn is
// long enough for several refreshes.
func pageOpen(ctx context.Context, b *bench) (samples, error) {
	k, err := b.kit(ctx, options{conns: pageClients + 4}, oneOf(pageScopes))
	if err != nil {
		return samples{}, err
	}
	defer k.drop()
	if err := k.crowd(ctx, b.pick(100, 2)); err != nil {
		return samples{}, err
	}
	page, err := console.New(k.Pool, console.Config{})
	if err != nil {
		return samples{}, err
	}
	server := httptest.NewServer(page)
	defer server.Close()
	defer page.Close()

	slice := time.Duration(b.pick(6500, 2500)) * time.Millisecond
	var s samples
	var open, alone []float64
	var seen int
	for round := range b.pick(6, 2) {
		rates := map[bool]float64{}
		for turn := range 2 {
			looks := (round+turn)%2 == 0
			n, rate, err := k.driven(ctx, server.URL, looks, slice)
			if err != nil {
				return samples{}, err
			}
			rates[looks] = rate
			seen += n
		}
		if round > 0 { // the first one warms up
			open, alone = append(open, rates[true]), append(alone, rates[false])
		}
		b.progress(round, b.pick(6, 2)-1)
	}
	s.values = ratios(open, alone)
	s.note = fmt.Sprintf("open %s/s, alone %s/s; the viewer was told %d times what is new", number(median(open)), number(median(alone)), seen)
	return s, nil
}

// crowd makes the entries that the page has to find its way in.
func (k *kit) crowd(ctx context.Context, times int) error {
	for range times {
		for from := 0; from < pageScopes; from += budget.MaxBatch {
			charges := make([]budget.Charge, budget.MaxBatch)
			for i := range charges {
				charges[i] = budget.Charge{Scope: scopeName(from + i), Amount: 1}
			}
			err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
				_, err := k.client.Budget.ChargeEach(ctx, tx, charges...)
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	_, err := k.Exec(ctx, "vacuum analyze metered.ledger")
	return err
}

// driven is one turn: what the viewer was told, if there is one, and the load's rate.
func (k *kit) driven(ctx context.Context, address string, looks bool, slice time.Duration) (seen int, rate float64, err error) {
	told := make(chan int, 1)
	stop := func() {}
	if looks {
		var viewing context.Context
		viewing, stop = context.WithCancel(ctx)
		go func() { told <- view(viewing, address+"/live?page=") }()
	}
	n, seconds, err := drive(ctx, func(ctx context.Context, _ int) error {
		_, err := metered.Do(ctx, k.client, metered.Command{
			ID: metered.NewID(), Name: "work", Charges: []budget.Charge{{Scope: k.scope(), Amount: 1, Limits: roomy}},
		}, func(context.Context, *metered.Tx) (struct{}, error) { return struct{}{}, nil })
		return err
	}, pageClients, slice, -1)
	stop()
	if err != nil {
		return 0, 0, err
	}
	if looks {
		if seen = <-told; seen == 0 {
			return 0, 0, errors.New("the viewer was told nothing")
		}
	}
	return seen, float64(n) / seconds, nil
}

// view listens to a stream, as a browser does, and counts what it is told.
func view(ctx context.Context, address string) (n int) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if lines.Text() == "" && strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
			n++ // an empty line ends a message
		}
	}
	return max(0, n-1) // without the greeting
}
