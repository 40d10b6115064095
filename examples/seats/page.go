package main

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5"
)

//go:embed page
var pageFiles embed.FS

var templates = template.Must(template.New("").Funcs(template.FuncMap{
	"euro": func(cents int64) string { return fmt.Sprintf("€%d.%02d", cents/100, cents%100) },
}).ParseFS(pageFiles, "page/*.html"))

// pages serves the pages. They get everything else from the API.
func (a *app) pages(mux *http.ServeMux) {
	mux.Handle("GET /page/", static())
	mux.HandleFunc("GET /{$}", a.serveHome)
	mux.HandleFunc("GET /events/{event}", a.page(buys, a.showEvent))
	mux.HandleFunc("GET /events/{event}/report", a.page(manages, a.showReport))
	mux.HandleFunc("POST /login", a.serveLogin)
	mux.HandleFunc("POST /logout", a.serveLogout)
}

// static serves the files of the page. A browser keeps them, and asks each time whether they are still the same.
func static() http.Handler {
	files, _ := fs.Sub(pageFiles, "page") // it is there: it was embedded
	tags := map[string]string{}
	_ = fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			content, _ := fs.ReadFile(files, name)
			tags["/page/"+name] = fmt.Sprintf(`"%x"`, sha256.Sum256(content))
		}
		return err
	})
	serve := http.StripPrefix("/page/", http.FileServerFS(files))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if tag := tags[r.URL.Path]; tag != "" {
			w.Header().Set("Cache-Control", "no-cache")
			w.Header().Set("ETag", tag)
		}
		serve.ServeHTTP(w, r)
	})
}

// page serves a page of an event to those who may see it.
func (a *app) page(needs right, show func(http.ResponseWriter, *http.Request, session, string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		who, err := a.signedIn(r)
		if err != nil {
			http.Redirect(w, r, "/", http.StatusSeeOther)
			return
		}
		event := r.PathValue("event")
		if !uuidForm.MatchString(event) {
			err = errNotFound
		} else if err = a.known(r.Context(), &who); err == nil && !who.Role.may(needs) {
			err = errNotAllowed
		}
		if err != nil {
			sorry(w, err)
			return
		}
		show(w, r, who, event)
	}
}

type choice struct{ ID, Name, Org string }

const (
	eventsSQL = `select id, name, '' from hall.events where org = $1 and ($2 or status not in ('draft', 'archived')) order by name`
	usersSQL  = `select u.id, u.name, o.name from hall.users u join hall.organisations o on o.id = u.org order by o.name, u.name limit 100`
)

// serveHome lists the events of a signed-in user, and shows the sign-in to others.
func (a *app) serveHome(w http.ResponseWriter, r *http.Request) {
	who, err := a.signedIn(r)
	if err == nil {
		err = a.known(r.Context(), &who)
	}
	name, sql, args := "home.html", eventsSQL, []any{who.Org, who.Role.may(manages)}
	if errors.Is(err, errNoSession) {
		name, sql, args, err = "login.html", usersSQL, nil, nil
	}
	var choices []choice
	if err == nil {
		rows, _ := a.pool.Query(r.Context(), sql, args...) // the error is that of the rows
		choices, err = pgx.CollectRows(rows, pgx.RowToStructByPos[choice])
	}
	if err != nil {
		sorry(w, err)
		return
	}
	show(w, name, map[string]any{"Who": who, "Choices": choices})
}

type (
	pageBlock struct {
		ID, Name string
		Cents    int64
		Rows     []pageRow
	}
	pageRow struct {
		Name  string
		Seats []pageSeat
	}
	pageSeat struct {
		ID              string
		Ordinal, Number int
	}
)

const pageSQL = `
select e.name, b.id, b.name, b.cents, s.row, s.id, s.ordinal, s.number
from hall.events e join hall.blocks b on b.event = e.id join hall.seats s on s.block = b.id
where e.id = $1 and e.org = $2
order by s.ordinal`

// showEvent is the page of an event: its seats, which never change. Their states come by the stream.
func (a *app) showEvent(w http.ResponseWriter, r *http.Request, who session, event string) {
	rows, _ := a.pool.Query(r.Context(), pageSQL, event, who.Org) // the error is that of the rows
	var title string
	var blocks []pageBlock
	var block pageBlock
	var row string
	var seat pageSeat
	_, err := pgx.ForEachRow(rows, []any{&title, &block.ID, &block.Name, &block.Cents, &row, &seat.ID, &seat.Ordinal, &seat.Number}, func() error {
		if n := len(blocks); n == 0 || blocks[n-1].ID != block.ID {
			blocks = append(blocks, block)
		}
		b := &blocks[len(blocks)-1]
		if n := len(b.Rows); n == 0 || b.Rows[n-1].Name != row {
			b.Rows = append(b.Rows, pageRow{Name: row})
		}
		in := &b.Rows[len(b.Rows)-1]
		in.Seats = append(in.Seats, seat)
		return nil
	})
	if err == nil && len(blocks) == 0 {
		err = errNotFound
	}
	if err != nil {
		sorry(w, err)
		return
	}
	show(w, "event.html", map[string]any{
		"Who": who, "Event": event, "Title": title, "Blocks": blocks, "PerUser": perUser.Max, "Source": who.Role.usual(),
		"Sells": who.Role.may(sells), "Manages": who.Role.may(manages), "Statuses": statuses,
	})
}

// statuses in words.
var statuses = []struct {
	Status status
	Words  string
}{
	{statusDraft, "a draft"}, {statusPublished, "on sale"}, {statusLive, "live: the doors are open"}, {statusClosed, "closed"},
	{statusCancelled, "cancelled"}, {statusArchived, "archived"},
}

// showReport shows the sales, in plots and in figures.
func (a *app) showReport(w http.ResponseWriter, r *http.Request, who session, event string) {
	p, err := a.readReport(r.Context(), who.Org, event, defaultHours)
	if err != nil {
		sorry(w, err)
		return
	}
	show(w, "report.html", map[string]any{"Who": who, "Report": p})
}

func show(w http.ResponseWriter, name string, data any) {
	var page bytes.Buffer
	if err := templates.ExecuteTemplate(&page, name, data); err != nil {
		sorry(w, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")

	_, _ = page.WriteTo(w)
}

func sorry(w http.ResponseWriter, err error) {
	r := explain(err)
	if r.Status >= http.StatusInternalServerError {
		slog.Warn("page not shown", "error", err)
	}
	http.Error(w, r.Detail, r.Status)
}
