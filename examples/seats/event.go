package main

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

// status is where an event is in its life.
type status string

const (
	statusDraft     status = "draft"     // listed for those who manage it
	statusPublished status = "published" // on sale, in its sale window
	statusLive      status = "live"      // its doors are open
	statusClosed    status = "closed"    // no longer sold, by decision
	statusCancelled status = "cancelled"
	statusArchived  status = "archived" // as a draft
)

// successors are the statuses that may come after one.
var successors = map[status][]status{
	statusDraft:     {statusPublished, statusCancelled, statusArchived},
	statusPublished: {statusDraft, statusLive, statusClosed, statusCancelled},
	statusLive:      {statusClosed, statusCancelled},
	statusClosed:    {statusPublished, statusLive, statusCancelled, statusArchived},
	statusCancelled: {statusArchived},
	statusArchived:  {},
}

// sale is when the seats of an event are sold, and for how long they are held.
type sale struct {
	// Opens and Closes are the window: from Opens, and until before Closes. Without one there is no such end.
	Opens  *time.Time `json:"opens"`
	Closes *time.Time `json:"closes"`
	// HoldSeconds is how long a seat is held. Defaults to the process's setting.
	HoldSeconds *int64 `json:"hold_seconds"`
	// HoldsEnd with the sale: after it, held seats cannot be paid for any more.
	HoldsEnd bool `json:"holds_end_with_sale"`
}

// hallEvent is the part of an event that decides whether a seat is sold, at the time of the library's clock.
type hallEvent struct {
	status status
	sale   sale
	now    time.Time
}

// eventColumns are of hall.events e, and of c, the clock.
const eventColumns = `e.status, e.opens, e.closes, e.hold_seconds, e.holds_end, c.now`

func (e *hallEvent) columns() []any {
	return []any{&e.status, &e.sale.Opens, &e.sale.Closes, &e.sale.HoldSeconds, &e.sale.HoldsEnd, &e.now}
}

// refuses says why a seat cannot be held by way of a source, or paid for: nil if it can.
func (e *hallEvent) refuses(by source) error {
	switch {
	case e.status == statusDraft:
		return errDraft
	case e.status == statusCancelled:
		return errCancelled
	case e.status == statusArchived:
		return errArchived
	case e.status == statusClosed:
		return errSaleClosed
	case !slices.Contains(by.statuses, e.status):
		return errNotLive
	case by.always:
		return nil
	case e.sale.Opens != nil && e.now.Before(*e.sale.Opens):
		return &refusal{
			Status: http.StatusConflict, Code: "sale_not_open", Detail: "The sale has not begun yet.",
			RetryAfterSeconds: seconds(e.sale.Opens.Sub(e.now)),
		}
	case e.over():
		return errSaleClosed
	}
	return nil
}

// over reports whether the sale window is.
func (e *hallEvent) over() bool { return e.sale.Closes != nil && !e.now.Before(*e.sale.Closes) }

// refusesPayment is refuses for a seat that is held already. It can be paid for when the sale window is over, unless holds
// end with it.
func (e *hallEvent) refusesPayment(by source) error {
	by.always = by.always || !e.sale.HoldsEnd || !e.over()
	return e.refuses(by)
}

// holdFor is how long a seat is held by way of a source.
func (e *hallEvent) holdFor(by source, usual time.Duration) (time.Duration, error) {
	d := usual
	if e.sale.HoldSeconds != nil {
		d = time.Duration(*e.sale.HoldSeconds) * time.Second
	}
	if e.sale.HoldsEnd && !by.always {
		d = min(d, e.sale.Closes.Sub(e.now))
	}
	if d < holds.DefaultMinTTL { // nobody pays so fast
		return 0, errSaleClosed
	}
	return d, nil
}

// nextChange is the time until the sale window opens or closes, or an hour.
func (e *hallEvent) nextChange() time.Duration {
	next := time.Hour
	for _, at := range []*time.Time{e.sale.Opens, e.sale.Closes} {
		if at != nil && at.After(e.now) {
			next = min(next, at.Sub(e.now))
		}
	}
	return next
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
