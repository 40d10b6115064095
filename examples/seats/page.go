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
	for pattern, serve := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET /{$}": a.serveHome, "GET /events/{event}": a.serveEvent, "POST /login": a.serveLogin, "POST /logout": a.serveLogout,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := serve(w, r); err != nil {
				sorry(w, err)
			}
		})
	}
}

type choice struct{ ID, Name, Org string }

const (
	eventsSQL = `select id, name, '' from hall.events where org = $1 and ($2 or status <> 'draft') order by name`
	usersSQL  = `select u.id, u.name, o.name from hall.users u join hall.organisations o on o.id = u.org order by o.name, u.name limit 100`
)

// serveHome lists the events of a signed-in user, and shows the sign-in to others.
func (a *app) serveHome(w http.ResponseWriter, r *http.Request) error {
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
		return err
	}
	return show(w, name, map[string]any{"Who": who, "Choices": choices})
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
		ID     string
		Number int
	}
)

const pageSQL = `
with rows as (
    select s.block, s.row as name, jsonb_agg(to_jsonb(s) order by s.ordinal) as seats from hall.seats s where s.event = $1 group by s.block, s.row
)
select e.name, (
    select jsonb_agg(to_jsonb(b) || jsonb_build_object('rows', (select jsonb_agg(to_jsonb(r) order by r.name) from rows r where r.block = b.id)) order by b.position)
    from hall.blocks b where b.event = e.id)
from hall.events e
where e.id = $1 and e.org = $2`

// serveEvent is the page of an event for those who may see it: its seats, which never change. Their states come by the
// stream. Others are sent to sign in.
func (a *app) serveEvent(w http.ResponseWriter, r *http.Request) error {
	event := r.PathValue("event")
	who, err := a.user(r)
	if errors.Is(err, errNoSession) {
		http.Redirect(w, r, "/", http.StatusSeeOther)
		return nil
	}
	if err == nil && !uuidForm.MatchString(event) {
		err = errNotFound
	}
	if err != nil {
		return err
	}
	var title string
	var blocks []pageBlock
	if err := noRows(a.pool.QueryRow(r.Context(), pageSQL, event, who.Org).Scan(&title, &blocks)); err != nil {
		return err
	}
	via := web
	if who.Role.may(boxOffice) {
		via = "box_office"
	}
	return show(w, "event.html", map[string]any{
		"Who": who, "Event": event, "Title": title, "Blocks": blocks, "PerUser": perUser.Max, "Source": via,
		"Sells": who.Role.may(boxOffice), "Manages": who.Role.may(manager),
	})
}

func show(w http.ResponseWriter, name string, data any) error {
	var page bytes.Buffer
	if err := templates.ExecuteTemplate(&page, name, data); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = page.WriteTo(w) // it fails if the client has gone
	return nil
}

func sorry(w http.ResponseWriter, err error) {
	r := explain(err)
	if r.Status >= http.StatusInternalServerError {
		slog.Warn("page not shown", "error", err)
	}
	http.Error(w, r.Detail, r.Status)
}
