package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/bounds"
)

var pageFigures = []figure{
	{"page_slowest_ms", "ms", atMost(100), "until the slowest of the console's pages is served, on 10,000 scopes with a million entries and two clients' load: the median of each page",
		on(options{conns: 8}, oneOf(pageScopes), slowestPage)},
}

const pageScopes = 10_000

// slowestPage gets each page some times, while a load goes on.
func slowestPage(ctx context.Context, b *bench, k *kit) (s samples, err error) {
	if err := k.crowd(ctx, b.pick(100, 2)); err != nil {
		return s, err
	}
	// By its last entry each scope may be nearly out, so that the overview reads its usage.
	scarce := []budget.Limit{{Max: int64(b.pick(120, 2)), Window: window}}
	page, err := console.New(k.Pool, console.Config{Limits: func(string) []budget.Limit { return scarce }})
	if err != nil {
		return s, err
	}
	server := httptest.NewServer(page)
	defer server.Close()
	defer page.Close()
	loading, stop := context.WithCancel(ctx)
	loaded := make(chan error, 1)
	go func() {
		const clients = 2 // more would take all of a small machine, and be measured themselves
		_, _, err := drive(loading, k.command, clients, time.Hour, 0)
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
		for range b.pick(15, 3) {
			began := time.Now()
			if _, err := ask(ctx, server.Client(), http.MethodGet, server.URL+"/"+name, nil, http.StatusOK); err != nil {
				return s, err
			}
			took = append(took, float64(time.Since(began).Microseconds())/1000)
		}
		if m := median(took); len(s.values) == 0 || m > median(s.values) {
			s.values, s.note = took, fmt.Sprintf("the slowest is /%s", name)
		}
	}
	return s, nil
}

// ask sends a request, and returns the body of the answer that is wanted. The cookie may be nil.
func ask(ctx context.Context, client *http.Client, method, address string, cookie *http.Cookie, want int) (string, error) {
	request, err := http.NewRequestWithContext(ctx, method, address, nil)
	if err != nil {
		return "", err
	}
	if cookie != nil {
		request.AddCookie(cookie)
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != want {
		err = fmt.Errorf("%s %s: %s: %s", method, address, response.Status, body)
	}
	return string(body), err
}

// crowd makes the entries that the page has to find its way in.
func (k *kit) crowd(ctx context.Context, times int) error {
	scopes := inTurn(pageScopes)
	for range times * pageScopes / bounds.MaxBatch {
		if err := k.chargeEach(ctx, units(bounds.MaxBatch, scopes)); err != nil {
			return err
		}
	}
	_, err := k.Exec(ctx, "vacuum analyze metered.ledger")
	return err
}

// command is the load: a charge that is recorded.
func (k *kit) command(ctx context.Context, _ int) error {
	_, err := metered.Do[any](ctx, k.client, metered.Command{ID: metered.NewID(), Name: "work", Charges: units(1, k.scope)}, nil)
	return err
}
