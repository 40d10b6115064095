package main

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

const endingSQL = `
select s.hold, s.id, b.name, s.row, s.number, s.holder, coalesce(s.source, ''), s.held_until, c.now
from (select metered.clock() as now) c, hall.seats s join hall.blocks b on b.id = s.block
where s.event = $1 and s.state = 'held' and s.held_until > c.now
order by s.held_until, s.ordinal`

const ownEventSQL = `select true from hall.events where id = $1 and org = $2`

// serveHolds tells which holds of an event end, and when: the next one first.
func (a *app) serveHolds(w http.ResponseWriter, r *request) error {
	var found bool
	if err := noRows(a.pool.QueryRow(r.Context(), ownEventSQL, r.event, r.who.Org).Scan(&found)); err != nil {
		return err
	}
	type ending struct {
		HoldID string `json:"hold_id"`
		SeatID string `json:"seat_id"`
		place
		Holder string `json:"holder"`
		Source string `json:"source"`
		end
	}
	list := []ending{}
	var e ending
	h := holds.Hold{State: holds.Held}
	rows, _ := a.pool.Query(r.Context(), endingSQL, r.event) // the error is that of the rows
	row := []any{&e.HoldID, &e.SeatID, &e.Section, &e.Row, &e.Number, &e.Holder, &e.Source, &h.Deadline, &h.Now}
	_, err := pgx.ForEachRow(rows, row, func() error {
		e.end = endOf(h)
		list = append(list, e)
		return nil
	})
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]any{"event_id": r.event, "holds": list})
}

// report counts the sold, held and blocked seats of an event.
type report struct {
	EventID  string          `json:"event_id"`
	Title    string          `json:"title"`
	At       time.Time       `json:"at"`
	Hours    []time.Time     `json:"hours"` // when each begins. The last one goes on
	Sections []sectionReport `json:"sections"`
}

type sectionReport struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Seats int    `json:"seats"`
	Cents int64  `json:"cents"` // of sold seats
	Now   tally  `json:"now"`
	// Hours counts the seats that became sold, held and blocked in each of report.Hours.
	Hours []tally `json:"hours"`
}

// Free is how many seats nobody has.
func (s sectionReport) Free() int { return s.Seats - s.Now.Sold - s.Now.Held - s.Now.Blocked }

type tally struct {
	Sold    int `json:"sold"`
	Held    int `json:"held"`
	Blocked int `json:"blocked"`
}

func (t tally) plus(u tally) tally {
	return tally{t.Sold + u.Sold, t.Held + u.Held, t.Blocked + u.Blocked}
}

const (
	defaultHours = 24
	maxHours     = 7 * 24
)

// A row for each section and hour, and one for each section without an hour, its present state: all at one moment.
const reportSQL = `
with clock as (
    select metered.clock() as now),
counted as (
    select s.block, null::timestamptz as hour,
        count(*) filter (where s.state = 'sold') as sold, count(*) filter (where s.state = 'held' and s.held_until > c.now) as held,
        count(*) filter (where s.state = 'blocked') as blocked, count(*) as seats
    from clock c, hall.seats s where s.event = $1 group by s.block
    union all
    select s.block, date_trunc('hour', a.at, 'UTC'),
        count(*) filter (where a.changes->>'state' = 'sold'), count(*) filter (where a.changes->>'transition' = 'placed'),
        count(*) filter (where a.changes->>'state' = 'blocked'), 0
    from clock c, hall.audit a join hall.seats s on s.id = a.seat
    where a.event = $1 and a.code = '' and a.at >= date_trunc('hour', c.now, 'UTC') - ($3 - 1) * interval '1 hour'
    group by 1, 2)
select e.name, c.now, b.id, b.name, b.cents, h.hour, coalesce(n.sold, 0), coalesce(n.held, 0), coalesce(n.blocked, 0), coalesce(n.seats, 0)
from clock c cross join hall.events e join hall.blocks b on b.event = e.id cross join lateral (
    select null::timestamptz as hour
    union all
    select date_trunc('hour', c.now, 'UTC') - i * interval '1 hour' from generate_series(0, $3 - 1) i) h
left join counted n on n.block = b.id and n.hour is not distinct from h.hour
where e.id = $1 and e.org = $2
order by b.position, h.hour nulls first`

func (a *app) readReport(ctx context.Context, org, event string, hours int) (*report, error) {
	p := &report{EventID: event}
	var s sectionReport
	var hour *time.Time
	var n tally
	var cents int64
	rows, _ := a.pool.Query(ctx, reportSQL, event, org, hours) // the error is that of the rows
	row := []any{&p.Title, &p.At, &s.ID, &s.Name, &cents, &hour, &n.Sold, &n.Held, &n.Blocked, &s.Seats}
	_, err := pgx.ForEachRow(rows, row, func() error {
		if hour == nil {
			s.Now, s.Cents = n, cents*int64(n.Sold)
			p.Sections = append(p.Sections, s)
			return nil
		}
		if len(p.Sections) == 1 {
			p.Hours = append(p.Hours, hour.UTC())
		}
		in := &p.Sections[len(p.Sections)-1]
		in.Hours = append(in.Hours, n)
		return nil
	})
	if err == nil && len(p.Sections) == 0 {
		err = errNotFound
	}
	p.At = p.At.UTC()
	return p, err
}

// reported is the report for a request: of the last hours, and of one section if it names one.
func (a *app) reported(r *request) (*report, error) {
	hours := defaultHours
	if given := r.URL.Query().Get("hours"); given != "" {
		n, err := strconv.Atoi(given)
		if err != nil || n < 1 || n > maxHours {
			return nil, badRequest("hours are 1 to " + strconv.Itoa(maxHours))
		}
		hours = n
	}
	p, err := a.readReport(r.Context(), r.who.Org, r.event, hours)
	if err != nil {
		return nil, err
	}
	if section := r.URL.Query().Get("section"); section != "" {
		p.Sections = slices.DeleteFunc(p.Sections, func(s sectionReport) bool { return s.ID != section })
		if len(p.Sections) == 0 {
			return nil, errNotFound
		}
	}
	return p, nil
}

func (a *app) serveReport(w http.ResponseWriter, r *request) error {
	p, err := a.reported(r)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, p)
}
