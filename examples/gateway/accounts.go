package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/wallet"
)

// gatewaySQL is the application's own tables: callers and answers. It knows nothing of the library.
const gatewaySQL = `
create table if not exists accounts (
    id     text primary key,       -- acme, acme/search, acme/search/ann, acme/search/ann/laptop
    parent text references accounts,
    level  text not null check (level in ('organisation', 'team', 'user', 'key')),
    monthly             bigint,    -- micro-dollars in a month of the organisation's time zone; null: no limit of its own
    tokens_per_minute   bigint,
    requests_per_minute bigint,
    zone       text,               -- of an organisation, as is the next
    admin      bytea unique,       -- SHA-256 of the secret that grants credit
    secret     bytea unique        -- SHA-256 of a key's
);
create table if not exists completions (
    key        text not null references accounts,
    id         text not null,      -- of the operation: the client's Idempotency-Key
    generation text not null unique, -- the model's id
    model      text not null,
    prompt     bigint not null,
    completion bigint not null,
    cost       bigint not null,
    finish     text not null,
    at         timestamptz not null default now(),
    primary key (key, id)
)`

// account is an organisation, a team, a user or a key, with limits of its own.
type account struct {
	ID, Level         string
	Monthly           *int64
	TokensPerMinute   *int64
	RequestsPerMinute *int64
}

// caller is the account chain of a request: the organisation first, the key last.
type caller struct {
	zone   *time.Location
	credit budget.Limit // of the organisation's wallet
	levels []account
}

func (c *caller) key() string { return c.levels[len(c.levels)-1].ID }

const callerSQL = `
with recursive up as (
    select 1 as height, a.* from accounts a where a.secret = $1
    union all
    select up.height + 1, a.* from up join accounts a on a.id = up.parent
)
select coalesce(zone, ''), id, level, monthly, tokens_per_minute, requests_per_minute from up order by height desc`

var errNobody = &httpmetered.Problem{Status: http.StatusUnauthorized, Detail: "want Authorization: Bearer, and a key"}

// caller finds the caller of a request.
func (g *gateway) caller(r *http.Request) (*caller, error) {
	rows, err := g.pool.Query(r.Context(), callerSQL, bearer(r))
	if err != nil {
		return nil, err
	}
	c := caller{credit: g.wallet.Limit()}
	var zone string
	var a account
	_, err = pgx.ForEachRow(rows, []any{&zone, &a.ID, &a.Level, &a.Monthly, &a.TokensPerMinute, &a.RequestsPerMinute}, func() (err error) {
		if len(c.levels) == 0 {
			c.zone, err = time.LoadLocation(zone)
		}
		c.levels = append(c.levels, a)
		return err
	})
	if err == nil && len(c.levels) == 0 {
		err = errNobody
	}
	return &c, err
}

// bearer is the digest of a request's secret: all that is stored of it.
func bearer(r *http.Request) []byte {
	secret, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	digest := sha256.Sum256([]byte(secret))
	return digest[:]
}

// admin is the organisation whose credit the caller may grant.
func (g *gateway) admin(r *http.Request) (organisation string, err error) {
	err = g.pool.QueryRow(r.Context(), `select id from accounts where admin = $1`, bearer(r)).Scan(&organisation)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errNobody
	}
	return organisation, err
}

// seedSQL makes an organisation to try things with: acme, with key-of-ann, key-of-ben and key-of-eve, and an admin. Secrets that
// are not for trying things are random, and long.
const seedSQL = `
insert into accounts (id, parent, level, zone, monthly, tokens_per_minute, requests_per_minute, secret, admin) values
    ('acme',                   null,              'organisation', 'Europe/Berlin', 50e6, null, null, null, sha256('admin-of-acme')),
    ('acme/search',            'acme',            'team', null, 30e6, 200e3, null, null,                 null),
    ('acme/search/ann',        'acme/search',     'user', null, 10e6, null,  null, null,                 null),
    ('acme/search/ann/laptop', 'acme/search/ann', 'key',  null, null, 20e3,  60,   sha256('key-of-ann'), null),
    ('acme/search/ben',        'acme/search',     'user', null, 10e6, null,  null, null,                 null),
    ('acme/search/ben/laptop', 'acme/search/ben', 'key',  null, null, 20e3,  60,   sha256('key-of-ben'), null),
    ('acme/ads',               'acme',            'team', null, 30e6, 200e3, null, null,                 null),
    ('acme/ads/eve',           'acme/ads',        'user', null, 10e6, null,  null, null,                 null),
    ('acme/ads/eve/laptop',    'acme/ads/eve',    'key',  null, null, 20e3,  60,   sha256('key-of-eve'), null)
on conflict (id) do nothing`

var errCredit = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "want an id, and an amount of micro-dollars"}

// credit grants a lot of paid or given credit. The payment's id makes it one lot, however often the request comes.
func (g *gateway) credit(w http.ResponseWriter, r *http.Request) error {
	organisation, err := g.admin(r)
	if err != nil {
		return err
	}
	var payment struct {
		ID       string    `json:"id"`
		Amount   int64     `json:"amount"`
		Category string    `json:"category"`
		Expires  time.Time `json:"expires"`
	}
	payment.Category = "paid"
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&payment); err != nil || payment.ID == "" {
		return errors.Join(errCredit, err)
	}
	var granted wallet.Granted
	err = g.metered.RunTx(r.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) (err error) {
		grant := wallet.Grant{
			Wallet: credit(organisation), Amount: payment.Amount, Category: payment.Category, Reference: payment.ID,
		}
		if !payment.Expires.IsZero() {
			grant.Ends = wallet.At(payment.Expires)
		}
		granted, err = g.wallet.Grant(ctx, tx, grant)
		return err
	})
	if err != nil {
		return err
	}
	return answer(w, granted)
}
