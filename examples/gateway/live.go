package main

import (
	"bytes"
	"context"
	_ "embed"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/wallet"
)

//go:embed page.html
var pageHTML string

var templates = template.Must(template.New("page").Funcs(template.FuncMap{
	"dollars": func(micro int64) float64 { return float64(micro) / dollar },
	"share": func(s standing, n int64) int64 {
		if s.Max <= 0 {
			return 0
		}
		return min(100, max(0, 100*n/s.Max))
	},
}).Parse(pageHTML))

func page(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
	return templates.ExecuteTemplate(w, "page", nil)
}

// view is the content of the page.
type view struct {
	Organisation string
	Standings    []standing
	Credit       wallet.Balance
	Last         []lastRow
}

type lastRow struct {
	Key, Model, Finish       string
	Prompt, Completion, Cost int64
	At                       time.Time
}

const lastSQL = `
select key, model, finish, prompt, completion, cost, at from completions
where starts_with(key, $1 || '/') order by at desc limit 10`

func (g *gateway) view(ctx context.Context, c *caller) (v view, err error) {
	v.Organisation = c.organisation()
	if v.Standings, err = g.standings(ctx, c); err != nil {
		return v, err
	}
	if v.Credit, err = g.wallet.Balance(ctx, g.pool, credit(v.Organisation)); err != nil {
		return v, err
	}
	rows, err := g.pool.Query(ctx, lastSQL, c.organisation())
	if err != nil {
		return v, err
	}
	v.Last, err = pgx.CollectRows(rows, pgx.RowToStructByPos[lastRow])
	return v, err
}

// live sends the view, whenever it has changed: as HTML, in server-sent events. It looks twice a second, for as long
// as somebody has the page open. Ledger reads take no locks.
func (g *gateway) live(w http.ResponseWriter, r *http.Request) error {
	c, err := g.caller(r)
	if err != nil {
		return err
	}
	look := time.NewTicker(500 * time.Millisecond)
	defer look.Stop()
	var shown string
	for {
		v, err := g.view(r.Context(), c)
		if err != nil {
			return err
		}
		var html bytes.Buffer
		if err := templates.ExecuteTemplate(&html, "live", v); err != nil {
			return err
		}
		if now := strings.ReplaceAll(html.String(), "\n", " "); now != shown {
			if sendEvent(w, now) != nil {
				return nil
			}
			shown = now
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-g.closing:
			return nil
		case <-look.C:
		}
	}
}
