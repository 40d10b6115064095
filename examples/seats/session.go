package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// session identifies the user. An organisation or a user in a request is ignored.
type session struct {
	Org     string    `json:"org"`
	User    string    `json:"user"`
	Expires time.Time `json:"expires"`

	// From the database, with each request.
	Name    string `json:"-"`
	OrgName string `json:"-"`
	Role    role   `json:"-"`
}

const (
	sessionCookie = "seats_session"
	sessionFor    = 12 * time.Hour
)

// tenant owns the user's operation ids.
func (s session) tenant() string { return s.Org + "/" + s.User }

var encoding = base64.RawURLEncoding

// sign returns the value of a session's cookie.
func (a *app) sign(s session) string {
	payload, _ := json.Marshal(s) // strings and a time
	return encoding.EncodeToString(payload) + "." + encoding.EncodeToString(a.mac(payload))
}

func (a *app) mac(payload []byte) []byte {
	h := hmac.New(sha256.New, a.secret)
	h.Write(payload)
	return h.Sum(nil)
}

// signedIn reads the session of a request, without any SQL.
func (a *app) signedIn(r *http.Request) (s session, err error) {
	cookie, err := r.Cookie(sessionCookie)
	if err != nil {
		return s, errNoSession
	}
	left, right, _ := strings.Cut(cookie.Value, ".")
	payload, err1 := encoding.DecodeString(left)
	mac, err2 := encoding.DecodeString(right)
	if err1 != nil || err2 != nil || !hmac.Equal(mac, a.mac(payload)) {
		return s, errNoSession
	}
	if json.Unmarshal(payload, &s) != nil || time.Now().After(s.Expires) {
		return session{}, errNoSession
	}
	return s, nil
}

const userSQL = `
select u.name, u.role, o.name
from hall.users u join hall.organisations o on o.id = u.org
where u.id = $1 and u.org = $2`

// known reads a session's user from the database, who may have gone since.
func (a *app) known(ctx context.Context, s *session) error {
	err := a.pool.QueryRow(ctx, userSQL, s.User, s.Org).Scan(&s.Name, &s.Role, &s.OrgName)
	if errors.Is(err, pgx.ErrNoRows) {
		return errNoSession
	}
	return err
}

// serveLogin is the demonstration's: it takes any user at their word.
func (a *app) serveLogin(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	if err := r.ParseForm(); err != nil {
		http.Error(w, "that is no login", http.StatusBadRequest)
		return
	}
	s := session{User: r.PostForm.Get("user"), Expires: time.Now().Add(sessionFor).UTC()}
	if !uuidForm.MatchString(s.User) {
		http.Error(w, "no such user", http.StatusBadRequest)
		return
	}
	err := a.pool.QueryRow(r.Context(), `select org from hall.users where id = $1`, s.User).Scan(&s.Org)
	if errors.Is(err, pgx.ErrNoRows) {
		http.Error(w, "no such user", http.StatusBadRequest)
		return
	} else if err != nil {
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	http.SetCookie(w, &http.Cookie{
		Name: sessionCookie, Value: a.sign(s), Path: "/", HttpOnly: true, Secure: r.TLS != nil,
		SameSite: http.SameSiteLaxMode, MaxAge: int(sessionFor / time.Second),
	})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (a *app) serveLogout(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{Name: sessionCookie, Path: "/", HttpOnly: true, MaxAge: -1})
	http.Redirect(w, r, "/", http.StatusSeeOther)
}
