package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/inspect"
)

var pageFigures = []figure{
	{
		name: "page_open_vs_alone", unit: "times the rate", goal: atLeast(0.97),
		meaning: "commands/s over 10,000 scopes with a million entries, 8 clients, with the console's overview open and metered top running, against nobody looking",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			p, err := b.page(ctx)
			return p.rate, err
		},
	},
	{
		name: "page_slowest_ms", unit: "ms", goal: atMost(100),
		meaning: "until the slowest of the console's pages is served, on the same database with two clients' load beside it: the median of each page",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			p, err := b.page(ctx)
			return p.slowest, err
		},
	},
}

const (
	pageScopes  = 10_000
	pageClients = 8
)

// paged is what was measured of the console, for both figures.
type paged struct{ rate, slowest samples }

func (b *bench) page(ctx context.Context) (paged, error) {
	return share(b, "page", func() (p paged, err error) {
		k, err := b.kit(ctx, options{conns: pageClients + 4}, oneOf(pageScopes))
		if err != nil {
			return p, err
		}
		defer k.drop()
		if err := k.crowd(ctx, b.pick(100, 2)); err != nil {
			return p, err
		}
		page, err := console.New(k.Pool, console.Config{Limits: func(string) []budget.Limit { return roomy }})
		if err != nil {
			return p, err
		}
		server := httptest.NewServer(page)
		defer server.Close()
		defer page.Close()
		if p.rate, err = b.pageOpen(ctx, k, server.URL); err == nil {
			p.slowest, err = k.slowestPage(ctx, server.URL, b.pick(15, 3))
		}
		return p, err
	})
}

// pageOpen measures the same load on the same database, in turns, with a viewer of the overview and without. A turn is
// long enough for several refreshes.
func (b *bench) pageOpen(ctx context.Context, k *kit, address string) (s samples, err error) {
	slice := time.Duration(b.pick(6500, 1000)) * time.Millisecond
	rounds := b.pick(6, 2)
	var open, alone []float64
	var seen int
	for round := range rounds {
		rates := map[bool]float64{}
		for turn := range 2 {
			looks := (round+turn)%2 == 0
			n, rate, err := k.driven(ctx, address, looks, slice)
			if err != nil {
				return s, err
			}
			rates[looks] = rate
			seen += n
		}
		if round > 0 { // the first one warms up
			open, alone = append(open, rates[true]), append(alone, rates[false])
		}
		b.progress(round, rounds-1)
	}
	s.values = ratios(open, alone)
	s.note = fmt.Sprintf("open %s/s, alone %s/s; the viewer was told %d times what is new", number(median(open)), number(median(alone)), seen)
	return s, nil
}

// slowestPage gets each page so many times, while the load goes on.
func (k *kit) slowestPage(ctx context.Context, address string, times int) (s samples, err error) {
	loading, stop := context.WithCancel(ctx)
	loaded := make(chan error, 1)
	go func() {
		const clients = 2 // more would take all of a small machine, and be what is measured
		_, _, err := drive(loading, k.command, clients, time.Hour, -1)
		loaded <- err
	}()
	defer func() {
		stop()
		if e := <-loaded; e != nil && ctx.Err() == nil && !errors.Is(e, context.Canceled) {
			err = errors.Join(err, e)
		}
	}()
	scope := url.QueryEscape(hotScope())
	for _, name := range []string{
		"", "scopes", "scopes?prefix=scope", "scope?scope=" + scope, "scope?amount=5&scope=" + scope, "scope?before=50&scope=" + scope,
		"usage.svg?limit=100/1h&scope=" + scope, "holds", "leases", "operations", "operations?name=work",
	} {
		var took []float64
		for range times {
			began := time.Now()
			if err := fetch(ctx, address+"/"+name); err != nil {
				return s, fmt.Errorf("%q: %w", name, err)
			}
			took = append(took, float64(time.Since(began).Microseconds())/1000)
		}
		if m := median(took); len(s.values) == 0 || m > median(s.values) {
			s.values, s.note = took, fmt.Sprintf("the slowest is /%s", name)
		}
	}
	return s, nil
}

func fetch(ctx context.Context, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return err
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
	told, top := make(chan int, 1), make(chan error, 1)
	stop := func() {}
	if looks {
		var viewing context.Context
		viewing, stop = context.WithCancel(ctx)
		go func() { told <- view(viewing, address+"/live?page=") }()
		go func() { top <- k.top(viewing) }()
	}
	n, seconds, err := drive(ctx, k.command, pageClients, slice, -1)
	stop()
	if err != nil {
		return 0, 0, err
	}
	if looks {
		if err := <-top; err != nil {
			return 0, 0, err
		}
		if seen = <-told; seen == 0 {
			return 0, 0, errors.New("the viewer was told nothing")
		}
	}
	return seen, float64(n) / seconds, nil
}

// top reads what the command line's top does, as often, until ctx ends.
func (k *kit) top(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		err := pgx.BeginTxFunc(ctx, k.Pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, "")
			if err == nil {
				_, err = r.Overview(ctx)
			}
			if err == nil {
				_, err = r.Hot(ctx, time.Minute, 10)
			}
			if err == nil {
				_, err = r.Denials(ctx, time.Minute, 10)
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// command is the load: a charge that is recorded.
func (k *kit) command(ctx context.Context, _ int) error {
	_, err := metered.Do(ctx, k.client, metered.Command{
		ID: metered.NewID(), Name: "work", Charges: []budget.Charge{{Scope: k.scope(), Amount: 1, Limits: roomy}},
	}, func(context.Context, *metered.Tx) (struct{}, error) { return struct{}{}, nil })
	return err
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
