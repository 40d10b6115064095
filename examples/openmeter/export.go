package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// exportSQL has a row for each event from before it is sent until the place in the feed has passed it.
const exportSQL = `create table openmeter_attempts (number bigint primary key, id text not null);`

// event is a CloudEvent of version 1.0. Its source and id name an entry for good: a receiver that
// has seen both knows the event.
type event struct {
	SpecVersion string    `json:"specversion"`
	ID          string    `json:"id"`
	Source      string    `json:"source"`
	Type        string    `json:"type"`
	Subject     string    `json:"subject"`
	Time        time.Time `json:"time"`
	ContentType string    `json:"datacontenttype"`
	Data        usage     `json:"data"`
}

// usage is what a meter sums: refunds count less than 0.
type usage struct {
	Units  int64  `json:"units"`
	Kind   string `json:"kind"`
	Number int64  `json:"number"`
}

// exporter sends the charges and refunds of all scopes as CloudEvents, to OpenMeter or another receiver.
type exporter struct {
	db     *pgxpool.Pool
	ledger *budget.Ledger

	http                   *http.Client
	base, key, source, typ string

	pause time.Duration // before the second try; it doubles
	tries int
}

// run sends what is new, and returns.
func (x *exporter) run(ctx context.Context) error {
	return x.ledger.RunFeed(ctx, x.db, "openmeter", budget.FeedOptions{Max: 100}, x.page)
}

// page sends a page as one batch. The place in the feed moves once the receiver has it. If the
// process dies in between, the batch comes again, with the same ids.
func (x *exporter) page(ctx context.Context, tx pgx.Tx, entries []budget.FeedEntry) error {
	ids, err := x.begin(ctx, entries)
	if err != nil {
		return err
	}
	var batch []event
	for _, e := range entries {
		units := e.Amount
		switch e.Kind {
		case budget.EntryCharge, budget.EntryCapture:
		case budget.EntryRefund:
			units = -units
		default:
			continue
		}
		batch = append(batch, event{
			SpecVersion: "1.0", ID: ids[e.Number], Source: x.source, Type: x.typ,
			Subject: e.Scope, Time: e.At, ContentType: "application/json",
			Data: usage{Units: units, Kind: string(e.Kind), Number: e.Number},
		})
	}
	if len(batch) > 0 {
		if err := x.send(ctx, batch); err != nil {
			return err
		}
	}
	_, err = tx.Exec(ctx, "delete from openmeter_attempts where number = any ($1)", numbers(entries))
	return err
}

// begin writes down, in a transaction of its own, as what each event was tried first: a pseudonym that
// a scope gets meanwhile changes no id.
func (x *exporter) begin(ctx context.Context, entries []budget.FeedEntry) (map[int64]string, error) {
	first := make([]string, len(entries))
	for i, e := range entries {
		first[i] = id(e)
	}
	_, err := x.db.Exec(ctx, "insert into openmeter_attempts select * from unnest($1::bigint[], $2::text[]) on conflict do nothing",
		numbers(entries), first)
	if err != nil {
		return nil, err
	}
	rows, err := x.db.Query(ctx, "select number, id from openmeter_attempts where number = any ($1)", numbers(entries))
	if err != nil {
		return nil, err
	}
	ids := make(map[int64]string)
	var number int64
	var tried string
	_, err = pgx.ForEachRow(rows, []any{&number, &tried}, func() error { ids[number] = tried; return nil })
	return ids, err
}

func numbers(entries []budget.FeedEntry) []int64 {
	all := make([]int64, len(entries))
	for i, e := range entries {
		all[i] = e.Number
	}
	return all
}

// send sends a batch until the receiver has it.
func (x *exporter) send(ctx context.Context, batch []event) error {
	body, err := json.Marshal(batch)
	if err != nil {
		return err
	}
	pause := x.pause
	for try := 1; ; try++ {
		status, answer, err := x.post(ctx, body)
		switch {
		case err == nil && status/100 == 2:
			return nil
		case err == nil && status != http.StatusTooManyRequests && status < 500:
			return fmt.Errorf("openmeter: %d: %s", status, answer)
		case err == nil:
			err = fmt.Errorf("openmeter: %d after %d tries: %s", status, try, answer)
		}
		if try == x.tries {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause/2 + rand.N(pause)):
		}
		pause = min(2*pause, time.Minute)
	}
}

// id names an entry for good: by its scope and number, and by what differs in an entry that has both
// after a failover lost this one.
func id(e budget.FeedEntry) string {
	return fmt.Sprintf("%s/%d/%d/%s/%d", e.Scope, e.Seq, e.At.UnixMicro(), e.Kind, e.Amount)
}

func (x *exporter) post(ctx context.Context, body []byte) (status int, answer string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.base+"/api/v1/events", bytes.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "application/cloudevents-batch+json")
	req.Header.Set("Authorization", "Bearer "+x.key)
	resp, err := x.http.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	return resp.StatusCode, string(raw), err
}
