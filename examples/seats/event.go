package main

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// status is where an event is in its life.
type status string

const (
	statusDraft     status = "draft"
	statusPublished status = "published" // on sale, in its sale window
	statusLive      status = "live"      // its doors are open
	statusClosed    status = "closed"    // no longer sold, by decision
	statusCancelled status = "cancelled"
)

// hallEvent is the part of an event that decides whether a seat is sold. It is sold from Opens, and until before Closes.
// Without one there is no such end.
type hallEvent struct {
	Status status     `json:"status"`
	Opens  *time.Time `json:"opens"`
	Closes *time.Time `json:"closes"`

	now time.Time // by the library's clock
}

// eventColumns are of hall.events e, and of c, the clock.
const eventColumns = `e.status, e.opens, e.closes, c.now`

func (e *hallEvent) columns() []any { return []any{&e.Status, &e.Opens, &e.Closes, &e.now} }

// refuses says why a seat cannot be held by way of a source: nil if it can.
func (e *hallEvent) refuses(by source) error {
	switch {
	case e.Status == statusDraft:
		return errDraft
	case e.Status == statusCancelled:
		return errCancelled
	case e.Status == statusClosed:
		return errSaleClosed
	case !slices.Contains(by.statuses, e.Status):
		return errNotLive
	case by.always:
		return nil
	case e.Opens != nil && e.now.Before(*e.Opens):
		return &refusal{
			Status: http.StatusConflict, Code: "sale_not_open", Detail: "The sale has not begun yet.",
			RetryAfterSeconds: seconds(e.Opens.Sub(e.now)),
		}
	case e.Closes != nil && !e.now.Before(*e.Closes):
		return errSaleClosed
	}
	return nil
}

// refusesPayment is refuses for a seat that is held already: it can be paid for when the sale window is over.
func (e *hallEvent) refusesPayment(by source) error {
	by.always = true
	return e.refuses(by)
}

// An event is sold and changed under a lock of its own, shared by all who sell. It is taken before the reads that
// depend on it, and before the locks of the library's scopes. It has a statement of its own, so that the next one
// sees the commits that it waited for. It is no row lock: those who share a row let each other past the one who waits
// to change it. In a rush nobody could close the sale. Advisory locks are granted in turn.
const (
	sellingSQL  = `select pg_advisory_xact_lock_shared($1, hashtext($2))`
	changingSQL = `select pg_advisory_xact_lock($1, hashtext($2))`

	eventLocks = 7_328_322 // the first half of their keys
)

// selling keeps an event as it is until the transaction ends, and then reads a row, in the same flight. It waits for
// a change that is under way, of the status or of a capacity, and the new state counts.
func selling(ctx context.Context, tx pgx.Tx, org, event string, row []any, sql string, args ...any) error {
	b := &pgx.Batch{}
	b.Queue(sellingSQL, eventLocks, org+"/"+event)
	b.Queue(sql, args...).QueryRow(func(r pgx.Row) error { return noRows(r.Scan(row...)) })
	return tx.SendBatch(ctx, b).Close()
}

// changing waits for the sales that are being made, and lets none begin until the transaction ends.
func changing(ctx context.Context, tx pgx.Tx, org, event string) error {
	_, err := tx.Exec(ctx, changingSQL, eventLocks, org+"/"+event)
	return err
}
