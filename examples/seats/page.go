package main

import (
	"bytes"
	"embed"
	"errors"
	"html/template"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5"
)

//go:embed page
var pageFiles embed.FS

var templates = template.Must(template.ParseFS(pageFiles, "page/*.html"))

// pages serves the pages. They get everything else from the API.
func (a *app) pages(mux *http.ServeMux) {
	mux.Handle("GET /page/", http.FileServerFS(pageFiles))
	mux.HandleFunc("GET /{$}", a.serveHome)
	mux.HandleFunc("GET /events/{event}", a.serveEvent)
	mux.HandleFunc("POST /login", a.serveLogin)
	mux.HandleFunc("POST /logout", a.serveLogout)
}

type choice struct{ ID, Name, Org string }

const (
	eventsSQL = `select id, name, '' from hall.events where org = $1 and ($2 or status <> 'draft') order by name`
	usersSQL  = `select u.id, u.name, o.name from hall.users u join hall.organisations o on o.id = u.org order by o.name, u.name limit 100`
)

// serveHome lists the events of a signed-in user, and shows the sign-in to others.
func (a *app) serveHome(w http.ResponseWriter, r *http.Request) {
	who, err := a.user(r)
	name, sql, args := "home.html", eventsSQL, []any{who.Org, who.Role.may(manager)}
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

// serveEvent is the page of an event for those who may see it: its seats, which never change. Their states come by the
// stream. Others are sent to sign in.
func (a *app) serveEvent(w http.ResponseWriter, r *http.Request) {
	event := r.PathValue("event")
	who, err := a.user(r)
	if errors.Is(err, errNoSession) {
		http.Redirect(w, r, "/", http.StatusSeeOther)
		return
	}
	if err == nil && !uuidForm.MatchString(event) {
		err = errNotFound
	}
	if err != nil {
		sorry(w, err)
		return
	}
	rows, _ := a.pool.Query(r.Context(), pageSQL, event, who.Org) // the error is that of the rows
	var title string
	var blocks []pageBlock
	var block pageBlock
	var row string
	var seat pageSeat
	_, err = pgx.ForEachRow(rows, []any{&title, &block.ID, &block.Name, &block.Cents, &row, &seat.ID, &seat.Ordinal, &seat.Number}, func() error {
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
	via := web
	if who.Role.may(boxOffice) {
		via = "box_office"
	}
	show(w, "event.html", map[string]any{
		"Who": who, "Event": event, "Title": title, "Blocks": blocks, "PerUser": perUser.Max, "Source": via,
		"Sells": who.Role.may(boxOffice), "Manages": who.Role.may(manager),
	})
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
