package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/observe"
)

// Resume returns a session of an operation that is open, from any process: to settle or cancel it where its result arrives, or after its
// process has died. ID and Tenant name it. Its fingerprint and, without Lines, its lines are those of Open. TTL, Grace, Note, Isolation
// and the next two are for this process, a Holder must be that of Open, and Name is for the record.
//
// Both sessions renew the hold, and one of them ends it. Then the other's Settle has the recorded Outcome, or with other amounts
// ErrConflict, its Cancel is a *LostError, and its context ends at its next renewal. An operation on record is a Finished session. Without
// an open session the error is a *LostError: Open begins anew.
func Resume[R any](ctx context.Context, c *Client, r Reservation) (*Session[R], error) {
	if err := c.made(); err != nil {
		return nil, err
	}
	if c.engine.Inside(ctx) {
		return nil, ErrNested
	}
	s, err := c.resume(ctx, r)
	if err == nil {
		s.start(ctx)
		s.tell(sessionResumed)
		return &Session[R]{s: s}, nil
	}
	if !errors.Is(err, holds.ErrUnknown) {
		return nil, err
	}
	op, lookErr := c.Lookup(ctx, c.pool, r.Tenant, r.ID)
	if errors.Is(lookErr, ErrUnknownOperation) {
		return nil, &LostError{ID: r.ID, Cause: err}
	} else if lookErr != nil {
		return nil, lookErr
	}
	out := Outcome[R]{Raw: op.Result, Replayed: true, Receipt: op.Receipt, Holds: op.Holds, At: op.At, Draws: op.Draws}
	if err := json.Unmarshal(op.Result, &out.Result); err != nil {
		return nil, fmt.Errorf("metered: read the result of operation %q: %w", r.ID, err)
	}
	work, cancel := context.WithCancelCause(ctx)
	cancel(ErrFinished)
	s.ctx, s.ended = work, true
	return &Session[R]{s: s, finished: true, out: out}, nil
}

// resume finds the open hold of an operation. The session is there on holds.ErrUnknown, too.
func (c *Client) resume(ctx context.Context, r Reservation) (_ *session, err error) {
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "metered.resume"})
	defer func() { span.End(err) }()
	r.TTL = cmp.Or(r.TTL, defaultSessionTTL)
	r.Grace = cmp.Or(r.Grace, (r.TTL / 4).Truncate(time.Microsecond))
	s := &session{client: c, r: r}
	if _, err := c.prepare(s.command(nil), nil); err != nil {
		return nil, renamed(err, "Command", "Reservation")
	}
	if err := c.check.Usable(ctx, c.pool); err != nil {
		return nil, err
	}
	began := time.Now()
	if s.hold, s.fingerprint, err = inHolds.OfSession(ctx, c.Holds, c.pool, r.Tenant, r.ID, r.Holder); err != nil {
		return s, err
	}
	if len(r.Lines) == 0 {
		for _, l := range s.hold.Lines {
			s.r.Lines = append(s.r.Lines, holds.Line{Scope: l.Scope, Amount: l.Amount})
		}
	}
	s.id, s.deadline = s.hold.ID, began.Add(s.hold.Remaining())
	return s, nil
}
