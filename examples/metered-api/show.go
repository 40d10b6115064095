package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// show is the demonstration, of one account.
func show(ctx context.Context, out io.Writer, ann client, a *app) error {
	post := func(key string, number int64) (id string) {
		r := ann.submit(ctx, key, number)
		fmt.Fprintf(out, "POST /tasks %d\n     %d %s\n", number, r.Status, r.Body)
		return r.Field("id")
	}
	watch := func(id string) {
		s, err := ann.await(ctx, id)
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
type client struct {
	*examplehttp.Client
	key string
}

func newClient(base, key string) client { return client{examplehttp.NewClient(base), key} }

func (c client) do(ctx context.Context, method, path, key string, body any) examplehttp.Answer {
	return c.Do(ctx, method, path, body, "Authorization", "Bearer "+c.key, "Idempotency-Key", key)
}

// submit asks for a number's factors. key may be "".
func (c client) submit(ctx context.Context, key string, number int64) examplehttp.Answer {
	return c.do(ctx, http.MethodPost, "/tasks", key, map[string]int64{"number": number})
}

// await asks for a task until it is done, or failed.
func (c client) await(ctx context.Context, id string) (s status, err error) {
	err = exampledb.Await(ctx, func() (bool, error) {
		r := c.do(ctx, http.MethodGet, "/tasks/"+id, "", nil)
		if r.Status != http.StatusOK {
			return false, fmt.Errorf("status %d: %s", r.Status, r.Body)
		}
		err := json.Unmarshal([]byte(r.Body), &s)
		return s.State != "waiting", err
	})
	return s, err
}
