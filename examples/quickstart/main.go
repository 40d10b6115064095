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
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// uploadsSQL is the application's own table. It knows nothing of the library.
const uploadsSQL = `
create table uploads (
    id         bigint generated always as identity primary key,
    account    text not null,
    name       text not null,
    content    bytea not null,
    sha256     bytea,       -- this and the next by the worker
    media_type text
)`

func main() {
	opts := exampledb.Options{Jobs: true, SQL: uploadsSQL, Durable: true}
	exampledb.With("quickstart", opts, func(ctx context.Context, db *exampledb.Database) (err error) {
		files, err := readFiles(os.Args[1:])
		if err != nil {
			return err
		}
		a, err := newApp(db.Pool, plansFor(files))
		if err != nil {
			return err
		}
		if err := db.Work(ctx, a.river); err != nil {
			return err
		}
		base, _, err := examplehttp.Serve(ctx, "127.0.0.1:0", &http.Server{Handler: a.handler(), ReadHeaderTimeout: 10 * time.Second})
		if err != nil {
			return err
		}
		s := &story{report: &report{out: os.Stdout}, db: db, app: a, client: examplehttp.NewClient(base), files: files}
		defer stopped(&err)
		for _, step := range []func(context.Context){
			s.uploads, s.repeats, s.overBudget, s.race, s.crash, s.lostAcknowledgement, s.ledger,
		} {
			step(ctx)
		}
		return s.summary()
	})
}

// readFiles reads the files named, or some of the repository's own.
func readFiles(paths []string) (files []upload, err error) {
	if len(paths) == 0 {
		_, here, _, _ := runtime.Caller(0)
		for _, name := range []string{"LICENSE", "metered.go", "go.sum", "schema.sql"} {
			paths = append(paths, filepath.Join(filepath.Dir(here), "..", "..", name))
		}
	}
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("name some files to upload: %w", err)
		}
		files = append(files, upload{Name: strings.ToValidUTF8(filepath.Base(path), "_"), Content: content})
	}
	return files, nil
}
