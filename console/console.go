// Package console is a page that shows the state of a schema of metered in a browser: scopes,
// holds, operations and River's jobs, live, and without JavaScript too.
//
//	page, err := console.New(pool, console.Config{})
//	mux.Handle("/console/", http.StripPrefix("/console", onlyStaff(page)))
//
// It can only read: a role with the grants of metered.GrantReportingSQL alone can serve it. Each
// request is one READ ONLY transaction.
//
// It authenticates nobody. Put it behind your program's authentication: everybody who reaches it
// sees every tenant's scopes, holds and operations.
package console

import (
	"fmt"
	"html/template"
	"log/slog"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/schema"
)

// Config configures a Handler. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// Limits returns the limits of a scope, of which the page shows up to 16. It is called from
	// several goroutines, and must not block. Limits that a user types replace them. Without any,
	// the page takes those of refusals on record.
	Limits func(scope string) []budget.Limit

	// RiverSchema has River's tables. Defaults to the first schema of the role's search_path that
	// has them.
	RiverSchema string

	// RiverUI is the address of River UI, which shows a job at /jobs/ID. Defaults to no links.
	RiverUI string

	// Title is the title of the page. Defaults to "metered".
	Title string

	// Location is the time zone of the times shown. Defaults to UTC.
	Location *time.Location

	// Refresh is how often an open page is read again, from 100ms to 1h. Defaults to 2s.
	Refresh time.Duration

	// Timeout bounds a page's reads, from 10ms to 1m. Defaults to 2s.
	Timeout time.Duration

	// MaxConns is the most connections in use at once, from 1 to 64. Defaults to 2.
	MaxConns int

	// MaxViewers is the most live browsers, from 1 to 10,000. Others load the page again. Defaults
	// to 100.
	MaxViewers int

	// Logger gets the errors of pages that could not be served. Defaults to slog.Default().
	Logger *slog.Logger
}

// Handler serves the pages. It is safe for concurrent use, and works at the root or behind
// http.StripPrefix.
type Handler struct {
	pool   *pgxpool.Pool
	cfg    Config
	begin  string        // the statements that begin each transaction
	slots  chan struct{} // has an element for each connection in use
	live   *live
	reader *inspect.Reader
	pages  map[string]shown // by path
	walk   walk
	wrong  *template.Template
}

// New returns a Handler on a pool, which may lead to a replica. It does not touch the database. A
// field of Config out of bounds is a *budget.ArgumentError.
func New(pool *pgxpool.Pool, cfg Config) (*Handler, error) {
	if pool == nil {
		return nil, fault.Invalid(errArgument, "pool", "is nil")
	}
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	reader, err := inspect.New(pool, cfg.Schema)
	if err != nil {
		return nil, err
	}
	h := &Handler{
		pool: pool, cfg: cfg,
		begin:  fmt.Sprintf(beginSQL, cfg.Timeout.Milliseconds()),
		slots:  make(chan struct{}, cfg.MaxConns),
		live:   newLive(cfg.Refresh, cfg.MaxViewers),
		reader: reader.WithRiver(cfg.RiverSchema),
	}
	h.pages = h.parse()
	return h, nil
}

// Close ends the streams of all viewers, and lets none begin: call it before http.Server.Shutdown,
// which waits for them (http.Server.RegisterOnShutdown). Pages are served as before.
func (h *Handler) Close() {
	if h.made() {
		h.live.close()
	}
}

// made reports whether New made the Handler.
func (h *Handler) made() bool { return h != nil && h.pages != nil }

// maxName is how long a name of Postgres's can be, in bytes.
const maxName = 63

var errArgument = fault.New("invalid_argument", "console: invalid argument")

// complete sets defaults, and refuses settings out of bounds.
func (c Config) complete() (Config, error) {
	if _, err := schema.Parse(c.Schema); err != nil {
		return c, fault.Invalid(errArgument, "Config.Schema", "%s", err)
	}
	if err := fault.Text(errArgument, "Config.RiverSchema", c.RiverSchema, maxName); err != nil {
		return c, err
	}
	for _, d := range []struct {
		field          string
		value          *time.Duration
		least, most, d time.Duration
	}{
		{"Config.Refresh", &c.Refresh, 100 * time.Millisecond, time.Hour, 2 * time.Second},
		{"Config.Timeout", &c.Timeout, 10 * time.Millisecond, time.Minute, 2 * time.Second},
	} {
		if *d.value == 0 {
			*d.value = d.d
		}
		if *d.value < d.least || *d.value > d.most {
			return c, fault.Invalid(errArgument, d.field, "is %v, want %v to %v", *d.value, d.least,
				d.most)
		}
	}
	for _, n := range []struct {
		field   string
		value   *int
		most, d int
	}{
		{"Config.MaxConns", &c.MaxConns, 64, 2},
		{"Config.MaxViewers", &c.MaxViewers, 10_000, 100},
	} {
		if *n.value == 0 {
			*n.value = n.d
		}
		if *n.value < 1 || *n.value > n.most {
			return c, fault.Invalid(errArgument, n.field, "is %d, want 1 to %d", *n.value, n.most)
		}
	}
	if c.RiverUI != "" {
		u, err := url.Parse(c.RiverUI)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return c, fault.Invalid(errArgument, "Config.RiverUI",
				"is not the address of a page: http or https, and a host")
		}
	}
	if c.Title == "" {
		c.Title = "metered"
	}
	if c.Location == nil {
		c.Location = time.UTC
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c, nil
}
