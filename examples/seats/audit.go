package main

import (
	"bytes"
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

const agentMax = 255

// agent is the client's own name for itself.
func (r *request) agent() string {
	agent := r.UserAgent()
	return strings.ToValidUTF8(agent[:min(len(agent), agentMax)], "") // Postgres takes no other
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
	_, err = db.Exec(ctx, auditSQL, r.who.Org, holds.User(r.who.User), r.action, code, r.event, r.block, r.seat, r.hold, r.operation,
		r.address(), r.agent(), text)
	return err
}

// recordFailure records a failure once its transaction is gone, even if the outcome is not known: then as
// service_unavailable or by the library's code. A failure without a session has no organisation, and goes to the log:
// whoever cannot sign in cannot fill the table.
func (a *app) recordFailure(r *request, err error) {
	p := explain(err)
	code := p.Code
	if code == "" {
		code = strings.ToLower(strings.ReplaceAll(http.StatusText(p.Status), " ", "_"))
	}
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
