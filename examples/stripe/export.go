package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// exportSQL has a row for each event from before it is sent until it is consumed, and one for each
// entry that Stripe did not get, with the reason: for an invoice item by hand.
const exportSQL = `
create table stripe_attempts (number bigint primary key, began_at timestamptz not null, identifier text not null);
create table stripe_unsent (number bigint primary key, scope text not null, seq bigint not null,
    kind text not null, amount bigint not null, at timestamptz not null, why text not null);`

// Stripe's rules for meter events, as of November 2026:
// https://docs.stripe.com/api/billing/meter-event/create and
// https://docs.stripe.com/billing/subscriptions/usage-based/recording-usage-api.
const (
	maxIdentifier = 100                 // characters
	remembered    = 24 * time.Hour      // an identifier is unique for a rolling time of at least this
	oldest        = 35 * 24 * time.Hour // an event must be of the past 35 calendar days
	margin        = time.Hour
)

// exporter sends the charges of scopes to a meter of Stripe, each once.
type exporter struct {
	db     *pgxpool.Pool
	ledger *budget.Ledger

	http             *http.Client
	base, key, event string

	// customer is the Stripe customer of a scope, or "": its entries are nobody's usage.
	customer func(scope string) string

	now   func() time.Time
	pause time.Duration // before the second try; it doubles
	tries int
}

// run sends what is new, and returns. Run it each minute, or give FeedOptions a Poll.
func (x *exporter) run(ctx context.Context) error {
	return x.ledger.RunFeed(ctx, x.db, "stripe", budget.FeedOptions{Max: 100, Patience: 30 * 24 * time.Hour}, x.page)
}

// page sends a page. The place in the feed moves with tx. If the process dies before, the events
// are sent again, and Stripe knows them by their identifiers.
func (x *exporter) page(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error {
	attempts, err := x.begin(ctx, entries)
	if err != nil {
		return err
	}
	unsent := make(map[int64]string)
	queues := make(map[string][]meterEvent) // by customer
	for _, e := range entries {
		customer := x.customer(e.Scope)
		switch {
		case customer == "":
		case e.Kind == budget.EntryRefund:
			unsent[e.Number] = "a refund: write a credit note"
		case e.Kind != budget.EntryCharge && e.Kind != budget.EntryCapture:
		case x.now().Sub(attempts[e.Number].began) > remembered-margin:
			unsent[e.Number] = "it may have been sent, and Stripe does not know it any more: look there"
		case x.now().Sub(e.At) > oldest-margin:
			unsent[e.Number] = "older than 35 days"
		default:
			queues[customer] = append(queues[customer], meterEvent{e, attempts[e.Number].identifier})
		}
	}
	if err := x.sendAll(ctx, queues, unsent); err != nil {
		return err
	}
	batch := &pgx.Batch{}
	for _, e := range entries {
		if why := unsent[e.Number]; why != "" {
			batch.Queue("insert into stripe_unsent values ($1, $2, $3, $4, $5, $6, $7)", e.Number, e.Scope, e.Seq, string(e.Kind), e.Amount, e.At, why)
		}
		batch.Queue("delete from stripe_attempts where number = $1", e.Number)
	}
	return tx.SendBatch(ctx, batch).Close()
}

// attempt is the first try to send an entry.
type attempt struct {
	began      time.Time
	identifier string
}

// meterEvent is an entry with the identifier of its first try.
type meterEvent struct {
	budget.FeedEntry
	identifier string
}

// begin writes down, in a transaction of its own, when each event was tried first, and as what: a
// pseudonym that a scope gets meanwhile changes no event.
func (x *exporter) begin(ctx context.Context, entries []budget.FeedEntry) (map[int64]attempt, error) {
	numbers, identifiers := make([]int64, len(entries)), make([]string, len(entries))
	for i, e := range entries {
		numbers[i], identifiers[i] = e.Number, identifier(e)
	}
	_, err := x.db.Exec(ctx, "insert into stripe_attempts select n, $2, i from unnest($1::bigint[], $3::text[]) u(n, i) on conflict do nothing", numbers, x.now(), identifiers)
	if err != nil {
		return nil, err
	}
	rows, err := x.db.Query(ctx, "select number, began_at, identifier from stripe_attempts where number = any ($1)", numbers)
	if err != nil {
		return nil, err
	}
	attempts := make(map[int64]attempt)
	var number int64
	var a attempt
	_, err = pgx.ForEachRow(rows, []any{&number, &a.began, &a.identifier}, func() error { attempts[number] = a; return nil })
	return attempts, err
}

// sendAll sends the events of several customers at the same time, and those of one customer one
// after the other: Stripe allows one concurrent call for a customer and a meter.
func (x *exporter) sendAll(ctx context.Context, queues map[string][]meterEvent, unsent map[int64]string) error {
	var all sync.WaitGroup
	var mu sync.Mutex
	var failed error
	slots := make(chan struct{}, 8)
	for customer, queue := range queues {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			for _, e := range queue {
				why, err := x.send(ctx, customer, e)
				mu.Lock()
				if why != "" {
					unsent[e.Number] = why
				}
				failed = errors.Join(failed, err)
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	all.Wait()
	return failed
}

// send sends one event until Stripe has it, or says why it will never take it. An error leaves open
// whether it has it: the event is sent again with the page.
func (x *exporter) send(ctx context.Context, customer string, e meterEvent) (why string, err error) {
	form := url.Values{
		"event_name": {x.event}, "identifier": {e.identifier},
		"timestamp":                   {strconv.FormatInt(e.At.Unix(), 10)},
		"payload[stripe_customer_id]": {customer}, "payload[value]": {strconv.FormatInt(e.Amount, 10)},
	}.Encode()
	pause := x.pause
	for try := 1; ; try++ {
		status, problem, err := x.post(ctx, form)
		switch {
		case err == nil && status/100 == 2, status == http.StatusBadRequest && problem.isDuplicate():
			return "", nil
		case status == http.StatusBadRequest:
			return problem.Message, nil
		case err == nil && status != http.StatusTooManyRequests && status != http.StatusConflict && status < 500:
			return "", fmt.Errorf("stripe: %d: %s", status, problem.Message) // a wrong key: nothing can be sent
		case try == x.tries:
			return "", cmp.Or(err, fmt.Errorf("stripe: %d after %d tries: %s", status, try, problem.Message))
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, time.Minute)
	}
}

// problem is the error of an answer.
type problem struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// isDuplicate reports whether Stripe has the event. Version 2 of its API documents a code for that;
// version 1, which is used here, has been seen to answer an invalid_request_error without a code.
func (p problem) isDuplicate() bool {
	return p.Code == "duplicate_meter_event" || strings.HasPrefix(p.Message, "An event already exists with identifier ")
}

func (x *exporter) post(ctx context.Context, form string) (status int, p problem, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.base+"/v1/billing/meter_events", strings.NewReader(form))
	if err != nil {
		return 0, p, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.SetBasicAuth(x.key, "")
	resp, err := x.http.Do(req)
	if err != nil {
		return 0, p, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	var body struct {
		Error problem `json:"error"`
	}
	if json.Unmarshal(raw, &body) != nil {
		body.Error.Message = http.StatusText(resp.StatusCode)
	}
	return resp.StatusCode, body.Error, err
}

// identifier names an entry for good: by its scope and number, and by what differs in an entry that
// has both after a failover lost this one. It is the digest of all if that is too long.
func identifier(e budget.FeedEntry) string {
	id := fmt.Sprintf("%s/%d/%d/%s/%d", e.Scope, e.Seq, e.At.UnixMicro(), e.Kind, e.Amount)
	if len(id) > maxIdentifier {
		id = fmt.Sprintf("%x", sha256.Sum256([]byte(id)))
	}
	return id
}
