// Command metered-api is an HTTP API of a computation that is billed by its actual cost.
//
//	go run ./examples/metered-api                           # shows it, and ends
//	go run ./examples/metered-api -listen 127.0.0.1:8080    # serves until Ctrl-C
//	curl -i 127.0.0.1:8080/tasks -H 'Authorization: Bearer key-of-ann' -d '{"number": 600851475143}'
//
// With -database, of the application's own, there can be any number of processes, and workers alone:
//
//	go run ./examples/metered-api -database postgres://… -listen 127.0.0.1:8080
//	go run ./examples/metered-api -database postgres://… -worker
//
// Read app.go, and http.go for its HTTP side. main.go runs it on a throwaway Postgres, or on that of DATABASE_URL in
// a database of its own that it drops at the end.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// hourly is an account's limit. Held units count as spent until the actual cost is known.
var hourly = []budget.Limit{budget.PerWindow(2_000_000, time.Hour).Named("hourly")}

func main() {
	listen := flag.String("listen", "", "serve at this address instead of the demonstration")
	worker := flag.Bool("worker", false, "work only, without HTTP; needs -database")
	database := flag.String("database", "", "connection string of a database to use, and to keep")
	flag.Parse()
	opts := exampledb.Options{Jobs: true, SQL: tasksSQL, Use: *database}
	exampledb.With("metered-api", opts, func(ctx context.Context, db *exampledb.Database) error {
		a, err := newApp(db.Pool, hourly)
		if err != nil {
			return err
		}
		handler, err := a.handler()
		if err != nil {
			return err
		}
		if err := db.Work(ctx, a.river); err != nil {
			return err
		}
		exampledb.Every(ctx, time.Minute, a.sweep)
		switch {
		case *worker && *database == "":
			return errors.New("-worker needs -database")
		case *worker:
			fmt.Println("working")
			<-ctx.Done()
			return nil
		}
		return examplehttp.Run(ctx, *listen, handler, func(base string) {
			fmt.Printf("curl -i %s/tasks -H 'Authorization: Bearer key-of-ann' -d '{\"number\": 600851475143}'\n", base)
		}, func(ctx context.Context, base string) error {
			return show(ctx, os.Stdout, newClient(base, "key-of-ann"), a)
		})
	})
}

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
