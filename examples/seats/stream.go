package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
)

// hallMap is an event's map at one moment.
type hallMap struct {
	hallEvent
	// Sale is "open", or the code that a hold by way of the web is refused with.
	Sale string `json:"sale"`
	// Seats has a letter for each seat, in their order: a available, h held, s sold, b blocked.
	Seats  string     `json:"seats"`
	Counts counts     `json:"counts"`
	Blocks []blockUse `json:"blocks"`

	// PercentAvailable and PercentHeld are parts of all seats.
	PercentAvailable float64 `json:"percent_available"`
	PercentHeld      float64 `json:"percent_held"`
	// At is the time of these, by the library's clock. A message with an earlier one is old.
	At time.Time `json:"timestamp"`

	holds   map[string][]ownHold // by holder: each gets their own
	nextEnd time.Duration        // until a hold runs out, or the sale opens or closes
	readAt  time.Time
}

type counts struct {
	Available int `json:"available"`
	Held      int `json:"held"`
	Sold      int `json:"sold"`
	Blocked   int `json:"blocked"`
	Seats     int `json:"seats"`
}

type blockUse struct {
	ID       string `json:"id"`
	Capacity int64  `json:"capacity"`
	Taken    int64  `json:"taken"` // held and sold
}

// ownHold is a hold of the viewer.
type ownHold struct {
	Hold      string    `json:"hold_id"`
	Seat      int       `json:"seat"` // its place in hallMap.Seats
	State     string    `json:"status"`
	HeldUntil time.Time `json:"held_until,omitzero"`
	// LeftMS is the time left, by the database's clock: the browser's may be wrong.
	LeftMS int64 `json:"left_ms"`
}

// One statement, and so one moment. metered.clock() is the clock by which the library ends holds.
const mapSQL = `
select ` + eventColumns + `, b.id, b.capacity, s.state, coalesce(s.hold, ''), coalesce(s.holder, ''),
    coalesce(s.held_until, 'epoch'), coalesce(extract(epoch from s.held_until - c.now) * 1000, 0)::bigint,
    coalesce(s.held_until <= c.now, false)
from (select metered.clock() as now) c, hall.events e join hall.seats s on s.event = e.id join hall.blocks b on b.id = s.block
where e.id = $1 and e.org = $2
order by s.ordinal`

var letters = map[string]byte{"free": 'a', "held": 'h', "sold": 's', "blocked": 'b'}

func (a *app) readMap(ctx context.Context, org, event string) (*hallMap, error) {
	rows, err := a.pool.Query(ctx, mapSQL, event, org)
	if err != nil {
		return nil, err
	}
	m := &hallMap{holds: map[string][]ownHold{}, readAt: time.Now()}
	var seats []byte
	var block blockUse
	var h ownHold
	var holder string
	var over bool
	row := append(m.columns(), &block.ID, &block.Capacity, &h.State, &h.Hold, &holder, &h.HeldUntil, &h.LeftMS, &over)
	nextEnd := time.Hour
	_, err = pgx.ForEachRow(rows, row, func() error {
		if over {
			h.State, holder = "free", ""
		}
		if n := len(m.Blocks); n == 0 || m.Blocks[n-1].ID != block.ID {
			m.Blocks = append(m.Blocks, block)
		}
		use := &m.Blocks[len(m.Blocks)-1]
		switch h.State {
		case "held":
			use.Taken++
			nextEnd = min(nextEnd, time.Duration(h.LeftMS)*time.Millisecond)
		case "sold":
			use.Taken++
		}
		if holder != "" {
			own := h
			own.Seat, own.HeldUntil = len(seats), h.HeldUntil.UTC()
			if h.State != "held" {
				own.HeldUntil = time.Time{}
			}
			m.holds[holder] = append(m.holds[holder], own)
		}
		seats = append(seats, letters[h.State])
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(seats) == 0 {
		return nil, errNotFound
	}
	of := func(state string) int { return bytes.Count(seats, []byte{letters[state]}) }
	m.Seats, m.Counts = string(seats), counts{of("free"), of("held"), of("sold"), of("blocked"), len(seats)}
	share := func(n int) float64 { return math.Round(1000*float64(n)/float64(len(seats))) / 10 }
	m.PercentAvailable, m.PercentHeld, m.At = share(m.Counts.Available), share(m.Counts.Held), m.now.UTC()
	for _, at := range []*time.Time{m.Opens, m.Closes} {
		if at != nil && at.After(m.now) {
			nextEnd = min(nextEnd, at.Sub(m.now))
		}
	}
	m.nextEnd, m.Sale = nextEnd, "open"
	if err := m.refuses(sources[web]); err != nil {
		m.Sale = explain(err).Code
	}
	return m, nil
}

// message is a map as its viewer gets it.
func (m *hallMap) message(user string) ([]byte, error) {
	own := append([]ownHold{}, m.holds[user]...)
	for i := range own {
		own[i].LeftMS = max(0, own[i].LeftMS-time.Since(m.readAt).Milliseconds())
	}
	return json.Marshal(struct {
		*hallMap
		Mine []ownHold `json:"mine"`
	}{m, own})
}

// serveMap answers with the map as it is now.
func (a *app) serveMap(w http.ResponseWriter, r *request) error {
	m, err := a.readMap(r.Context(), r.who.Org, r.event)
	if err != nil {
		return err
	}
	text, err := m.message(r.who.User)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, json.RawMessage(text))
}

const writeTimeout = 10 * time.Second

// serveStream sends the map now and whenever it was read anew, as server-sent events.
func (a *app) serveStream(w http.ResponseWriter, r *request) error {
	if _, err := a.readMap(r.Context(), r.who.Org, r.event); err != nil {
		return err
	}
	watch, leave := a.live.look(r.who.Org, r.event)
	defer leave()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // for a proxy in between
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // a stream outlives Server.ReadTimeout
	for {
		m, next := watch.now()
		if m != nil {
			body, err := m.message(r.who.User)
			// Whoever does not read for so long loses the connection, and may come again.
			if err != nil || control.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil {
				return nil
			}
			if _, err := fmt.Fprintf(w, "data: %s\n\n", body); err != nil || control.Flush() != nil {
				return nil
			}
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-next:
			if m, _ := watch.now(); m == nil {
				return nil
			}
		}
	}
}
