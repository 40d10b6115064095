package main

import (
	"crypto/rand"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
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
func (a *app) serveLogin(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	id := rand.Text()
	tag, err := a.pool.Exec(r.Context(), loginSQL, id, r.PostFormValue("user"), sessionFor)
	if err == nil && tag.RowsAffected() == 0 {
		err = badRequest("no such user")
	}
	if err != nil {
		sorry(w, err)
		return
	}
	http.SetCookie(w, &http.Cookie{
		Name: sessionCookie, Value: id, Path: "/", HttpOnly: true, Secure: r.TLS != nil,
		SameSite: http.SameSiteLaxMode, MaxAge: int(sessionFor / time.Second),
	})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (a *app) serveLogout(w http.ResponseWriter, r *http.Request) {
	if cookie, err := r.Cookie(sessionCookie); err == nil {
		if _, err := a.pool.Exec(r.Context(), `delete from hall.sessions where id = $1`, cookie.Value); err != nil {
			sorry(w, err)
			return
		}
	}
	http.SetCookie(w, &http.Cookie{Name: sessionCookie, Path: "/", HttpOnly: true, MaxAge: -1})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}
