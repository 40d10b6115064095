// Command quickstart runs metered commands on a real Postgres and shows their guarantees.
//
//	go run ./examples/quickstart [files…]
//
// It uploads each file, by default some of this repository's own, over HTTP on loopback with an upload grant that can
// be used once. One transaction spends the grant, stores the upload, enqueues a job for it and charges its bytes to
// an hourly and a daily budget. Then the program tries to break that, and checks the rows in the database. It exits
// with 0 only if every check held.
//
// It starts a throwaway Postgres. If DATABASE_URL is set it uses that server, in a database of its own named
// metered_quickstart_…, which it drops at the end, unless it is killed. The role must be allowed to create databases.
//
// Read upload.go, the command, and handler.go, its HTTP side. The rest is the demonstration.
package main

import (
	"context"
	"errors"
	"net/http"
	"os"
	"time"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

func main() {
	exampledb.Main("quickstart", func(ctx context.Context) error { return run(ctx, &report{out: os.Stdout}, os.Args[1:]) })
}

// story is the state that the steps of the demonstration share.
type story struct {
	*report
	db     *exampledb.Database
	app    *app
	client *client
	files  []file
	first  struct { // upload, for the step that repeats it
		request sent
		answer  answer
	}
}

func run(ctx context.Context, r *report, args []string) (err error) {
	files, err := readFiles(args)
	if err != nil {
		return err
	}
	began := time.Now()
	r.title("Postgres")
	db, err := exampledb.Open(ctx, "quickstart", exampledb.Options{
		Jobs: true, SQL: uploadsSQL, Durable: true, Log: indented{r.out},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	a, err := newApp(db.Pool, plansFor(files))
	if err != nil {
		return err
	}
	stopWork, err := exampledb.Work(ctx, a.river)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopWork()) }()
	base, _, err := examplehttp.Serve(ctx, "127.0.0.1:0", &http.Server{Handler: a.handler(), ReadHeaderTimeout: 10 * time.Second})
	if err != nil {
		return err
	}
	r.line("schema and River's tables made, HTTP at %s (%v)", base, time.Since(began).Round(time.Millisecond))

	s := &story{report: r, db: db, app: a, client: newClient(base), files: files}
	defer stopped(&err)
	for _, step := range []func(context.Context){
		s.uploads, s.repeats, s.overBudget, s.race, s.crash, s.lostAcknowledgement, s.ledger,
	} {
		step(ctx)
	}
	return r.summary()
}
