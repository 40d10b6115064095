package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/mail"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
)

// usersSQL is the application's own table. It needs no unique index on the address: the claim keeps it unique, from before
// there is a user.
const usersSQL = `
create table users (
    id    bigint generated always as identity primary key,
    email text not null,
    name  text not null
)`

// signup gives each address to one visitor at a time, and to one user for good.
type signup struct {
	pool    *pgxpool.Pool
	metered *metered.Client
	ttl     time.Duration // how long a visitor has to finish
}

const emailType = "email"

var (
	errAddress = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "that is no e-mail address"}
	errName    = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "that is no name"}
)

// normalise decides when two addresses are the same: here in any case. The library compares bytes. Mail goes to the
// address as it was typed.
func normalise(text string) (string, error) {
	address, err := mail.ParseAddress(text)
	if err != nil || address.Address != text || len(text) > 254 {
		return "", errAddress
	}
	return strings.ToLower(text), nil
}

// typed is the metadata of a claim: the address as its visitor wrote it.
type typed struct{ Email string }

func typedIn(h holds.Hold) (t typed, err error) {
	err = json.Unmarshal(h.Metadata, &t)
	return t, err
}

// claim holds an address for a visitor. The same visitor gets the same claim and deadline again. Everybody else gets
// a *holds.TakenError, which says for how long, but not by whom.
func (s *signup) claim(ctx context.Context, visitor, email string) (h holds.Hold, err error) {
	email = strings.TrimSpace(email)
	key, err := normalise(email)
	if err != nil {
		return h, err
	}
	metadata, err := json.Marshal(typed{email})
	if err != nil {
		return h, err
	}
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		h, err = s.metered.Holds.Claim(ctx, tx, holds.Claim{
			Key: holds.Key{Type: emailType, Value: key}, Holder: visitor, TTL: s.ttl, Metadata: metadata,
		})
		return err
	})
	return h, err
}

type user struct {
	ID    int64  `json:"id"`
	Email string `json:"email"`
	Name  string `json:"name"`
}

// confirm makes the user and confirms the claim with the user's id, or does neither. It is a command with the claim's id:
// sent again, it is answered with the same user.
func (s *signup) confirm(ctx context.Context, visitor, claim, name string) (user, error) {
	if strings.TrimSpace(name) == "" || len(name) > 200 || strings.ContainsFunc(name, unicode.IsControl) {
		return user{}, errName
	}
	out, err := metered.Do(ctx, s.metered, metered.Command{
		ID: claim, Tenant: visitor, Name: "confirm", Input: name,
	}, func(ctx context.Context, tx *metered.Tx) (u user, err error) {
		h, err := s.metered.Holds.Get(ctx, tx, "", claim, visitor)
		if err != nil {
			return u, err
		}
		t, err := typedIn(h)
		if err != nil {
			return u, err
		}
		u = user{Email: t.Email, Name: name}
		err = tx.QueryRow(ctx, `insert into users (email, name) values ($1, $2) returning id`, u.Email, u.Name).Scan(&u.ID)
		if err != nil {
			return u, err
		}
		return u, tx.Capture(holds.Capture{IDs: []string{claim}, All: true, Holder: visitor, Entity: fmt.Sprint("user/", u.ID)})
	})
	return out.Result, err
}

// cancel gives the address up. A claim that has ended by itself is as good as cancelled.
func (s *signup) cancel(ctx context.Context, visitor, claim string) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := s.metered.Holds.Release(ctx, tx, holds.Release{IDs: []string{claim}, Holder: visitor})
		return err
	})
	var ended *holds.StateError
	if errors.As(err, &ended) && (ended.State == holds.Released || ended.State == holds.Expired) {
		return nil
	}
	return err
}
