package inspect

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lend"
)

// HoldFilter selects holds. A zero field selects all. A hold must match every other field.
type HoldFilter struct {
	Tenant *string // nil: of every tenant
	Scope  string  // with a line of this scope
	State  holds.State
	// Sessions selects the holds of metered.Open, by the form of their ids.
	Sessions bool
	After    string // continues a list: HoldList.Next of the page before
	Limit    int    // the size of a page, 1 to MaxPage. Defaults to DefaultPage
}

// HoldList is a page of holds.
type HoldList struct {
	Holds []holds.Hold `json:"holds"`
	Next  string       `json:"next,omitempty"` // continues the list, "" at its end
}

// Holds lists holds of any tenant. With Scope and State Held they come in the order in which they
// fall due, the first MaxLooked of them. All others come newest first, and a page looks at
// MaxLooked of those: it may be empty and have a Next. See Book.List for one tenant, and by holder,
// entity or claim, and Book.Due for the next to fall due.
func (r *Reader) Holds(ctx context.Context, f HoldFilter) (HoldList, error) {
	limit, err := pageSize(f.Limit)
	if err := cmp.Or(err, checkText("HoldFilter.Scope", f.Scope)); err != nil {
		return HoldList{}, err
	}
	state, ok := holdStates[f.State]
	if !ok {
		return HoldList{}, invalid("HoldFilter.State", "%q is not a state", f.State)
	}
	if f.Scope != "" && f.State == holds.Held {
		return r.heldOf(ctx, f, limit)
	}
	before := int64(math.MaxInt64)
	if f.After != "" {
		if before, err = strconv.ParseInt(f.After, 10, 64); err != nil {
			return HoldList{}, invalid("HoldFilter.After", "%q is not a HoldList.Next", f.After)
		}
	}
	list, _, no, err := r.holds(ctx, holdsSQL, before, MaxLooked, f.Tenant, state, f.Scope, limit, f.Sessions)
	if err != nil {
		return HoldList{}, err
	}
	if len(list) < limit {
		if err := r.row(ctx, holdsEndSQL, before, MaxLooked).Scan(&no); err != nil {
			return HoldList{}, failed("holds", err)
		}
	}
	page := HoldList{Holds: list}
	if no > 0 {
		page.Next = fmt.Sprint(no)
	}
	return page, nil
}

// holdStates are the states as the filter of the query has them.
var holdStates = map[holds.State]string{"": "", holds.Held: "h", holds.Captured: "c", holds.Released: "r", holds.Expired: "x", holds.Returned: "b"}

// holdsSQL looks at the newest holds before $1, $2 of them at most, and stops when it has found
// enough. The line of the scope is a scalar subquery: an EXISTS could be answered by a hash of all
// lines.
const holdsSQL = `
select x.no, x.due, metered.hold_json(x.no, c.now)
from (select metered.clock() as now offset 0) c, (
    select h.no, h.id, h.tenant, h.state, h.returned, h.due from metered.holds h where h.no < $1 order by h.no desc limit $2) x
where ($3::text is null or x.tenant = $3)
  and ($4 = '' or $4 = case when x.state = 'h' and x.due <= c.now then 'x' when x.returned then 'b' else x.state::text end)
  and ($5 = '' or (select l.hold from metered.hold_lines l where l.hold = x.no and l.scope = $5) is not null)
  and (not $7::bool or x.id ~ ` + sessionIDs + `)
limit $6`

// sessionIDs are the ids of holds of sessions: a digest of the operation's id, and a UUID or the beginning of one.
const sessionIDs = `'^session_[0-9a-f]{32}_([0-9a-f-]{36}|[0-9A-Za-z_-]{16})$'`

// IsSession reports whether a hold is that of a session (metered.Open).
func IsSession(id string) bool { return sessionID.MatchString(id) }

var sessionID = regexp.MustCompile(strings.Trim(sessionIDs, "'"))

// holdsEndSQL is the last hold that holdsSQL may look at, or 0 if it looks at all that there are.
const holdsEndSQL = `
select coalesce((select h.no from metered.holds h where h.no < $1 order by h.no desc offset $2::bigint - 1 limit 1), 0)`

var decodeHold = lend.Borrow[interface {
	Decode(raw []byte) (holds.Hold, error)
}]("holds").Decode

// holds runs a query that returns holds, and where the last of them stands.
func (r *Reader) holds(ctx context.Context, sql string, args ...any) (list []holds.Hold, due time.Time, no int64, err error) {
	list, err = collect(ctx, r, sql, func(row pgx.CollectableRow) (h holds.Hold, err error) {
		var raw []byte
		if err := row.Scan(&no, &due, &raw); err != nil {
			return h, err
		}
		return decodeHold(raw)
	}, args...)
	return list, due, no, failed("holds", err)
}

// heldOfSQL goes by the index of open lines.
const heldOfSQL = `
select x.hold, x.due, metered.hold_json(x.hold, c.now)
from (select metered.clock() as now offset 0) c, lateral (
    select l.hold, l.due from metered.hold_lines l
    where l.scope = $1 and l.open > 0 and l.due >= greatest($2, c.now) and (l.due > $2 or l.hold > $3)
    order by l.due, l.hold limit $4) x, lateral (
    select h.id, h.tenant, h.state, h.due from metered.holds h where h.no = x.hold limit 1) h
where h.state = 'h' and h.due > c.now and ($5::text is null or h.tenant = $5) and (not $7::bool or h.id ~ ` + sessionIDs + `)
limit $6`

// heldOf are the open holds of a scope, first due first.
func (r *Reader) heldOf(ctx context.Context, f HoldFilter, limit int) (HoldList, error) {
	var us, no int64
	if f.After != "" {
		if _, err := fmt.Sscanf(f.After, "%d.%d", &us, &no); err != nil {
			return HoldList{}, invalid("HoldFilter.After", "%q is not a HoldList.Next", f.After)
		}
	}
	list, due, no, err := r.holds(ctx, heldOfSQL, f.Scope, time.UnixMicro(us), no, MaxLooked, f.Tenant, limit, f.Sessions)
	if err != nil || len(list) < limit {
		return HoldList{Holds: list}, err
	}
	return HoldList{Holds: list, Next: fmt.Sprintf("%d.%d", due.UnixMicro(), no)}, nil
}

// HoldDetail is a hold and its history.
type HoldDetail struct {
	Hold    holds.Hold           `json:"hold"`
	History []holds.HistoryEvent `json:"history"` // oldest first
}

// Hold returns a hold with its history, or the errors of Book.Get.
func (r *Reader) Hold(ctx context.Context, tenant, id string) (HoldDetail, error) {
	h, err := r.Book.Get(ctx, r.DB, tenant, id, "")
	if err != nil {
		return HoldDetail{}, err
	}
	history, err := r.Book.History(ctx, r.DB, tenant, id, "")
	return HoldDetail{h, history}, err
}
