package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
)

// show serves on loopback, and is its own client.
func show(ctx context.Context, out io.Writer, a *app) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	base, closed, err := a.serve(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := story(ctx, out, client{base, "key-of-ann"}, a); err != nil {
		return err
	}
	cancel()
	return <-closed
}

func story(ctx context.Context, out io.Writer, ann client, a *app) error {
	post := func(key string, number int64) reply {
		r := ann.submit(ctx, key, number)
		fmt.Fprintf(out, "POST /tasks %d\n     %d %s\n", number, r.Status, r.Body)
		return r
	}
	watch := func(r reply) {
		s, err := ann.await(ctx, r.ID)
		text, _ := json.Marshal(s)
		if err != nil {
			text = []byte(err.Error())
		}
		fmt.Fprintf(out, "GET /tasks/…: %s\n", text)
	}
	fmt.Fprintln(out, "The estimate is held, the actual cost is charged. Sent again with its key, it is the same task.")
	first := post("key-1", 600851475143)
	post("key-1", 600851475143)
	watch(first)
	fmt.Fprintln(out, "\nA prime costs all of its estimate.")
	watch(post("", 1_000_000_000_039))
	fmt.Fprintln(out, "\nThis one takes too long. Its hold lasts while it is tried, and is released in the end.")
	long := post("", 1<<63-25)
	post("", 1<<60-93)
	watch(long)

	usage, err := a.metered.Budget.Usage(ctx, a.pool, budget.Query{Scope: scopeOf("ann")})
	if err != nil {
		return err
	}
	report, err := a.metered.Budget.Verify(ctx, a.pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\ncharged: %d, held: %d; verified %d entries: %d differences\n",
		usage[0].Spent, usage[0].Held, report.Entries, len(report.Differences))
	return ctx.Err()
}

// client is an account's.
type client struct{ base, key string }

type reply struct {
	Status     int // 0: no answer
	RetryAfter string
	Body       string
	ID         string // of the task
}

// submit asks for a number's factors. key may be "".
func (c client) submit(ctx context.Context, key string, number int64) reply {
	body := fmt.Appendf(nil, `{"number": %d}`, number)
	return c.do(ctx, http.MethodPost, "/tasks", key, body)
}

// await asks for a task until it is done, or failed.
func (c client) await(ctx context.Context, id string) (s status, err error) {
	for {
		r := c.do(ctx, http.MethodGet, "/tasks/"+id, "", nil)
		if r.Status != http.StatusOK {
			return s, fmt.Errorf("status %d: %s", r.Status, r.Body)
		}
		if err := json.Unmarshal([]byte(r.Body), &s); err != nil || s.State != "waiting" {
			return s, err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return s, context.Cause(ctx)
		}
	}
}

func (c client) do(ctx context.Context, method, path, key string, body []byte) reply {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return reply{Body: err.Error()}
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply{Body: err.Error()}
	}
	defer res.Body.Close()
	all, err := io.ReadAll(res.Body)
	if err != nil {
		return reply{Body: err.Error()}
	}
	r := reply{Status: res.StatusCode, RetryAfter: res.Header.Get("Retry-After"), Body: strings.TrimSpace(string(all))}
	var task struct{ ID string }
	_ = json.Unmarshal(all, &task)
	r.ID = task.ID
	return r
}
