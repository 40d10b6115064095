package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/holds"
)

type askingKey struct{}

// asking is a context that knows its request, for the audit of a hold's transition, which gets only the context.
func (r *request) asking(ctx context.Context) context.Context {
	return context.WithValue(ctx, askingKey{}, r)
}

// askingIn is the request of a context, an empty one for a cleanup job.
func askingIn(ctx context.Context) *request {
	if r, ok := ctx.Value(askingKey{}).(*request); ok {
		return r
	}
	return &request{Request: &http.Request{}}
}

// address is the client's address. Behind a proxy, take it from the proxy's header.
func (r *request) address() string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// agent is the client's own name for itself, 255 bytes of it at most.
func (r *request) agent() string {
	agent := r.UserAgent()
	return strings.ToValidUTF8(agent[:min(len(agent), 255)], "") // Postgres takes no other
}

const auditSQL = `
insert into hall.audit (org, actor, action, code, event, block, seat, hold, operation, address, agent, changes)
values ($1, $2, $3, $4, nullif($5, '')::uuid, nullif($6, '')::uuid, nullif($7, '')::uuid, nullif($8, ''), nullif($9, ''), $10, $11, $12)`

// audit records a change or, with a code, a request that failed.
func (r *request) audit(ctx context.Context, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, code string, changes any) error {
	text, err := json.Marshal(changes)
	if err != nil {
		return err
	}
	text = bytes.ReplaceAll(text, []byte(`\u0000`), []byte(`\ufffd`)) // jsonb has no such character
	_, err = db.Exec(ctx, auditSQL, r.who.Org, "user:"+r.who.User, r.action, code, r.event, r.block, r.seat, r.hold, r.operation,
		r.address(), r.agent(), text)
	return err
}

// recordFailure records a failure once its transaction is gone, even if the outcome is not known: then as
// service_unavailable or by the library's code. A failure without a session has no organisation, and goes to the log:
// whoever cannot sign in cannot fill the table.
func (a *app) recordFailure(r *request, err error) {
	p := explain(err)
	code := cmp.Or(p.Code, strings.ToLower(strings.ReplaceAll(http.StatusText(p.Status), " ", "_")))
	if r.who.Org == "" {
		slog.Info("refused", "action", r.action, "code", code, "address", r.address(), "agent", r.agent())
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 2*time.Second) // the client may have gone
	defer cancel()
	if writeErr := r.audit(ctx, a.pool, code, r.asked); writeErr != nil {
		slog.Error("a failure could not be recorded", "operation", r.operation, "action", r.action, "code", code, "error", writeErr)
	}
}

// noRows makes of an answer without rows that there is no such thing.
func noRows(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return errNotFound
	}
	return err
}

// The end of a hold matters only if the seat shows that hold: an older one's end can be announced late, when the seat
// is somebody else's.
const projectSQL = `
with changed as (
    update hall.seats s
    set state = $2, hold = $3, holder = $4, held_until = $5, source = $6
    where s.id = $1 and (s.hold = $7 or $8))
insert into hall.audit (org, actor, action, event, seat, hold, operation, address, agent, changes)
select e.org, $9, $10, e.id, s.id, $7, nullif($11, ''), $12, $13, $14
from hall.seats s join hall.events e on e.id = s.event
where s.id = $1`

// changes are the audit table's columns of a transition.
type changes struct {
	Transition holds.EventKind `json:"transition"`
	State      string          `json:"state"` // of the seat
	Source     string          `json:"source,omitempty"`
	HeldUntil  *time.Time      `json:"held_until,omitempty"`
	Entity     string          `json:"entity,omitempty"`
	Reason     string          `json:"reason,omitempty"`
}

// project writes a transition into the copy that the map is read from, and into the audit table. Both are in the
// transaction of the transition, so that neither is without the other.
func project(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
	h := t.Hold
	if h.Claim == nil || h.Claim.Type != "seat" || isBlock(h) && t.Kind == holds.EventPlaced { // which is captured at once
		return nil
	}
	c := changes{Transition: t.Kind, State: "free", Source: sourceOf(h), Entity: h.Entity, Reason: t.Note.Reason}
	hold, holder, source := &h.ID, &h.Holder, &c.Source
	switch t.Kind {
	case holds.EventPlaced, holds.EventExtended:
		c.State, c.HeldUntil = "held", &h.Due
	case holds.EventCaptured:
		c.State = "sold"
		if isBlock(h) {
			c.State = "blocked"
		}
	default:
		hold, holder, source = nil, nil, nil
	}
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	takes := t.Kind == holds.EventPlaced || c.State == "blocked"
	r := askingIn(ctx)
	_, err = tx.Exec(ctx, projectSQL, h.Claim.Value, c.State, hold, holder, c.HeldUntil, source,
		h.ID, takes, t.Note.Actor, cmp.Or(r.action, string(t.Kind)), t.Note.Correlation, r.address(), r.agent(), text)
	return err
}
