package console_test

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
)

// With the grants for reports alone, River's jobs are numbers. With a grant on its table the page describes them.
func TestRole_JobsAreShownIfTheyMayBeRead(t *testing.T) {
	t.Parallel()
	for grant, want := range map[string]string{"": "Only their numbers are known", "grant select on river_job to $role": "process available default"} {
		w := newWorld(t, console.Config{RiverUI: "https://river.example/ui/"}, grant)
		require.NoError(t, w.order("o", "s", 5))
		page := w.see("operation", "tenant", "shop", "id", "o")
		require.Contains(t, text(page), want)
		var links []string
		for _, a := range all(page, "a") {
			if href, _ := attr(a, "href"); strings.HasPrefix(href, "https:") {
				links = append(links, href)
			}
		}
		require.Len(t, links, 1)
		require.Regexp(t, `^https://river\.example/ui/jobs/\d+$`, links[0])
	}
}

// Even as the owner of everything, no page can write: its transactions are READ ONLY.
func TestRole_EveryStatementIsInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	require.NoError(t, w.order("o", "s", 5))
	watched := &watch{t: t}
	config := w.pool.Config().Copy()
	config.ConnConfig.Tracer = watched
	pool := newPool(t, config)
	page, err := console.New(pool, console.Config{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	w.page = page
	server := w.serve(page)
	for _, name := range []string{"", "scopes", "scope?scope=s&amount=1&limits=1/1h", "holds", "leases", "operations", "operation?tenant=shop&id=o", "usage.svg?scope=s&limit=1/1h", "holds.svg?scope=s", "hold?tenant=acme&id=x"} {
		response, _ := w.get(server + name)
		require.NotEqual(t, http.StatusInternalServerError, response.StatusCode, name)
	}
	require.Greater(t, watched.began, 9)
}

// watch fails the test for each statement outside of a READ ONLY transaction with a timeout.
type watch struct {
	t        *testing.T
	began    int
	readOnly map[*pgx.Conn]bool
}

func (w *watch) TraceQueryStart(ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if w.readOnly == nil {
		w.readOnly = map[*pgx.Conn]bool{}
	}
	sql := strings.ToLower(strings.TrimSpace(q.SQL))
	switch {
	case strings.HasPrefix(sql, "--"): // the pool asks whether a connection that was idle lives
		return ctx
	case strings.HasPrefix(sql, "begin"):
		w.readOnly[conn] = strings.Contains(sql, "read only") && strings.Contains(sql, "statement_timeout")
		w.began++
	case sql == "commit" || sql == "rollback":
		defer delete(w.readOnly, conn)
	}
	if !w.readOnly[conn] {
		w.t.Errorf("not in a READ ONLY transaction: %s", q.SQL)
	}
	return ctx
}

func (w *watch) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The page names a role without the grants, and a schema that is not there. Postgres's own message goes to the log
// alone.
func TestRole_NamesMissingGrantsAndSchemas(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	nobody := pgtest.AsRole(t, w.pool, nil, "")
	for _, c := range []struct {
		cfg  console.Config
		want string
	}{{console.Config{}, "GrantReportingSQL"}, {console.Config{Schema: "elsewhere"}, "metered.Migrate"}} {
		c.cfg.Logger = slog.New(slog.DiscardHandler)
		pool := w.reader
		if c.cfg.Schema == "" {
			pool = nobody
		}
		page, err := console.New(pool, c.cfg)
		require.NoError(t, err)
		response, body := w.get(w.serve(page))
		require.Equal(t, http.StatusInternalServerError, response.StatusCode)
		require.Contains(t, text(parse(t, body)), c.want)
		require.NotContains(t, string(body), "42501")
	}
}
