package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// session identifies the user. An organisation or a user in a request is ignored.
type session struct {
	Org, User     string
	Name, OrgName string
	Role          role
}

const (
	sessionCookie = "seats_session"
	sessionFor    = 12 * time.Hour
)

// tenant owns the user's operation ids.
func (s session) tenant() string { return s.Org + "/" + s.User }

const sessionSQL = `
select u.org, u.id, u.name, o.name, u.role
from hall.sessions s join hall.users u on u.id = s.person join hall.organisations o on o.id = u.org
where s.id = $1 and s.expires > now()`

// user finds the user of a request's session, in their present role.
func (a *app) user(r *http.Request) (s session, err error) {
	cookie, err := r.Cookie(sessionCookie)
	if err != nil {
		return s, errNoSession
	}
	err = a.pool.QueryRow(r.Context(), sessionSQL, cookie.Value).Scan(&s.Org, &s.User, &s.Name, &s.OrgName, &s.Role)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errNoSession
	}
	return s, err
}

const loginSQL = `insert into hall.sessions (id, person, expires) select $1, id, now() + $3 from hall.users where id::text = $2`

// serveLogin is the demonstration's: it takes any user at their word.
func (a *app) serveLogin(w http.ResponseWriter, r *http.Request) error {
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	id := rand.Text()
	tag, err := a.pool.Exec(r.Context(), loginSQL, id, r.PostFormValue("user"), sessionFor)
	if err == nil && tag.RowsAffected() == 0 {
		err = badRequest("no such user")
	}
	if err != nil {
		return err
	}
	http.SetCookie(w, &http.Cookie{
		Name: sessionCookie, Value: id, Path: "/", HttpOnly: true, Secure: r.TLS != nil,
		SameSite: http.SameSiteLaxMode, MaxAge: int(sessionFor / time.Second),
	})
	http.Redirect(w, r, "/", http.StatusSeeOther)
	return nil
}

func (a *app) serveLogout(w http.ResponseWriter, r *http.Request) error {
	if cookie, err := r.Cookie(sessionCookie); err == nil {
		if _, err := a.pool.Exec(r.Context(), `delete from hall.sessions where id = $1`, cookie.Value); err != nil {
			return err
		}
	}
	http.SetCookie(w, &http.Cookie{Name: sessionCookie, Path: "/", HttpOnly: true, MaxAge: -1})
	http.Redirect(w, r, "/", http.StatusSeeOther)
	return nil
}

// role is a user's role in their organisation. Each may do what the one before may.
type role string

const (
	customer  role = "customer"   // holds seats, gives them back and pays for them
	boxOffice role = "box_office" // blocks seats
	manager   role = "manager"    // decides on events
)

var roles = []role{customer, boxOffice, manager}

func (r role) may(needed role) bool { return slices.Index(roles, r) >= slices.Index(roles, needed) }

// source is a way by which seats are held. A request names it.
type source struct {
	needs    role
	statuses []status       // of the event, while it sells
	always   bool           // before the sale opens and after it has closed, too
	limits   []budget.Limit // on the holds of a user
}

// web is the source of a request that names none.
const web = "web"

var sources = map[string]source{
	web:          {needs: customer, statuses: []status{statusPublished, statusLive}, limits: []budget.Limit{perUser}},
	"scanner":    {needs: boxOffice, statuses: []status{statusLive}, always: true, limits: []budget.Limit{perUser}},
	"box_office": {needs: boxOffice, statuses: []status{statusPublished, statusLive}, always: true},
}

// via is the source that a request names, if its user may use it.
func (r *request) via(name string) (string, error) {
	name = cmp.Or(name, web)
	s, ok := sources[name]
	switch {
	case !ok:
		return "", badRequest("the source is none")
	case !r.who.Role.may(s.needs):
		return "", &refusal{Status: http.StatusForbidden, Code: "source_not_allowed", Detail: "You may not hold seats this way."}
	}
	return name, nil
}
