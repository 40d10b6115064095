// Package console is a page to look at: what a schema of metered stands at, served to a browser.
//
//	page, err := console.New(pool, console.Config{})
//	mux.Handle("/console/", http.StripPrefix("/console", onlyStaff(page)))
//
// It shows an overview (rate, denials, hot scopes, holds, the lag of the sweep, leases), a scope (its usage against
// each of its limits over time, its entries, its holds, why a charge would be refused), a hold's history, an operation, and River's
// jobs behind it. It is live, and works without JavaScript too.
//
// It can only read. Each request is one READ ONLY transaction with a timeout, and a role that has nothing but what
// metered.GrantReportingSQL gives can serve it.
//
// It asks nobody who they are. Put it behind the authentication of your program: whoever reaches it sees every tenant's
// scopes, holds and operations.
package console

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
)

// ArgumentError says why a field of Config was refused.
type ArgumentError = fault.Argument

// Config configures a Handler. The zero value is ready for use.
type Config struct {
	Schema string // the schema that metered.Migrate created; defaults to "metered"

	// Limits returns the limits of a scope, which come with each call and are not in the database. It is called for every
	// scope that is looked at, from several goroutines, and must not block. What a user types into the page's
	// form counts instead. Defaults to none.
	Limits func(scope string) []budget.Limit

	// RiverSchema is where River's tables are; defaults to the first schema of the role's search_path that has them. The
	// page says so if there are none, or if the role may not read river_job.
	RiverSchema string
	RiverUI     string // the address of River UI, to link to its page of a job; defaults to no links

	Title    string         // of the page, in its header; defaults to "metered"
	Location *time.Location // of the times shown; defaults to UTC

	Refresh    time.Duration // how often what is looked at is read anew, 100ms to 1h; defaults to 2s
	Timeout    time.Duration // of each request's and each refresh's reads, 10ms to 1m; defaults to 2s
	MaxConns   int           // how many connections of the pool the page uses at once, 1 to 64; defaults to 2
	MaxViewers int           // how many browsers are kept live at once, 1 to 10,000; others reload; defaults to 100

	Logger *slog.Logger // is told of what could not be served; defaults to slog.Default()
}

// Handler serves the pages. It is safe for concurrent use, and works at the root or behind http.StripPrefix.
type Handler struct {
	pool *pgxpool.Pool
	cfg  Config
}

// New returns a Handler on a pool, or an *ArgumentError. It does not touch the database. The pool may lead to a replica.
func New(pool *pgxpool.Pool, cfg Config) (*Handler, error) {
	return &Handler{pool: pool, cfg: cfg}, nil
}

// ServeHTTP answers GET and HEAD.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	http.Error(w, "not yet", http.StatusNotImplemented)
}

// Close ends the streams of all viewers, and lets none begin: call it before http.Server.Shutdown, which waits for them
// (http.Server.RegisterOnShutdown). Pages are served as before.
func (h *Handler) Close() {}
