package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// show serves on loopback, and is its own visitors.
func show(ctx context.Context, out io.Writer, pool *pgxpool.Pool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const ttl = 2 * time.Second // nobody wants to wait for long
	s, err := newSignup(pool, ttl)
	if err != nil {
		return err
	}
	base, closed, err := serve(ctx, "127.0.0.1:0", s)
	if err != nil {
		return err
	}
	if err := story(ctx, out, base, ttl); err != nil {
		return err
	}
	cancel()
	return <-closed
}

func story(ctx context.Context, out io.Writer, base string, ttl time.Duration) error {
	ann, ben := newBrowser(base), newBrowser(base)
	ask := func(who string, b *browser, method, path string, body any) (a reply) {
		a = b.do(ctx, method, path, body)
		fmt.Fprintf(out, "%s: %s %s %v\n     %d %s", who, method, path, body, a.Status, a.Body)
		return a
	}
	fmt.Fprintln(out, "Ann claims an address, twice: it is the same claim, with the same deadline.")
	first := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "ann@example.com"})
	ask("Ann", ann, "POST", "/claims", map[string]string{"email": "Ann@Example.com"})
	fmt.Fprintln(out, "\nBen cannot have it, nor do anything with Ann's claim.")
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ANN@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+first.ID, nil)
	fmt.Fprintln(out, "\nAnn confirms, twice: one user.")
	for range 2 {
		ask("Ann", ann, "POST", "/claims/"+first.ID+"/confirm", map[string]string{"name": "Ann"})
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ann@example.com"})

	fmt.Fprintln(out, "\nBen claims another one, and cancels: Ann can have it.")
	second := ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+second.ID, nil)
	third := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	fmt.Fprintln(out, "\nAnn goes away. When her time is over Ben can have it, and Ann comes too late.")
	select {
	case <-time.After(ttl):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ann", ann, "POST", "/claims/"+third.ID+"/confirm", map[string]string{"name": "Ann's shop"})

	const racers = 20
	fmt.Fprintf(out, "\n%d people want the same address at the same moment.\n", racers)
	fmt.Fprintln(out, "status and how many:", race(ctx, base, racers))
	return ctx.Err()
}

// race has n browsers claim one address at once, and counts the answers.
func race(ctx context.Context, base string, n int) map[int]int {
	var wg sync.WaitGroup
	var mu sync.Mutex
	counts := map[int]int{}
	for range n {
		b := newBrowser(base)
		wg.Go(func() {
			a := b.do(ctx, "POST", "/claims", map[string]string{"email": "info@example.com"})
			mu.Lock()
			defer mu.Unlock()
			counts[a.Status]++
		})
	}
	wg.Wait()
	return counts
}

// browser is one visitor.
type browser struct {
	base string
	http *http.Client
}

func newBrowser(base string) *browser {
	jar, _ := cookiejar.New(nil)
	return &browser{base, &http.Client{Jar: jar, Timeout: 30 * time.Second, Transport: &http.Transport{}}}
}

type reply struct {
	Status     int // 0: no answer
	RetryAfter string
	Body       string
	ID         string // of a claim
}

func (b *browser) do(ctx context.Context, method, path string, body any) (a reply) {
	defer b.http.CloseIdleConnections()
	text, _ := json.Marshal(body)
	req, err := http.NewRequestWithContext(ctx, method, b.base+path, bytes.NewReader(text))
	if err != nil {
		return reply{Body: err.Error()}
	}
	res, err := b.http.Do(req)
	if err != nil {
		return reply{Body: err.Error()}
	}
	defer res.Body.Close()
	all, err := io.ReadAll(res.Body)
	if err != nil {
		return reply{Body: err.Error()}
	}
	a = reply{Status: res.StatusCode, RetryAfter: res.Header.Get("Retry-After"), Body: string(all)}
	var claim struct{ ID any }
	_ = json.Unmarshal(all, &claim)
	a.ID, _ = claim.ID.(string)
	if a.Body == "" {
		a.Body = "\n"
	}
	return a
}
