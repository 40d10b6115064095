package metered

import (
	"context"
	"errors"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// ended reports the end of a command to the observer. op is nil if it was refused before any SQL.
func (c *Client) ended(ctx context.Context, span observed.Span, op *operation, lent, returned bool, err error) {
	if c.observer == nil {
		return
	}
	if !returned {
		err = command.ErrPanics
	}
	end := observe.End{Err: err, Outcome: outcomeOf(op, lent, err)}
	if op != nil {
		end.Attempts, end.RoundTrips = op.Attempts, op.RoundTrips
	}
	switch end.Outcome {
	case observe.Committed, observe.Open:
		op.tell(ctx, lent)
	case observe.Refused:
		if op == nil || op.rec.Refusal == nil && op.own(err) { // else it was reported before
			inTokens.TellRefused(ctx, c.observer, err)
			if op != nil && !op.stickyRefused {
				inBudget.TellDenied(ctx, c.observer, err)
			}
		}
	}
	span.With(end)
}

func outcomeOf(op *operation, lent bool, err error) observe.Outcome {
	switch {
	case err == nil && op.rec.Replayed:
		return observe.Replayed
	case err == nil && lent:
		return observe.Open
	case err == nil:
		return observe.Committed
	case errors.Is(err, ErrIndefinite):
		return observe.Indefinite
	case op != nil && op.Failed: // the function's own error, whatever it is
		return observe.Failed
	case fault.Refused(err):
		return observe.Refused
	case errors.Is(err, ErrConflict), errors.Is(err, ErrRetired), errors.Is(err, ErrFuture):
		return observe.Conflict
	}
	return observe.Failed
}

// tell reports the steps of a command to the observer, once they are done.
func (op *operation) tell(ctx context.Context, lent bool) {
	if op.Token.Digest != nil {
		op.client.observer.Event(ctx, observe.Event{Kind: observe.TokenConsumed, Pending: lent})
	}
	for i, kind := range op.tx.kinds {
		inHolds.Tell(ctx, op.client.observer, kind, []holds.Hold{op.tx.done[i]}, lent)
	}
}
