package budget

import (
	"context"
	"errors"
	"slices"

	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// begin reports the beginning of a call to the observer.
func (l *Ledger) begin(ctx context.Context, name string) (context.Context, observed.Span) {
	return l.observer.Start(ctx, observe.Op{Work: observe.Call, Name: name})
}

// ended reports the end of a call that charges.
func (l *Ledger) ended(ctx context.Context, span observed.Span, err error) {
	tellRefused(ctx, l.observer, err)
	span.End(err)
}

// tellRefused reports the limits that err names as those that refused.
func tellRefused(ctx context.Context, to *observed.To, err error) {
	if to == nil || err == nil {
		return
	}
	var refused *ExceededError // from here on, since it is allocated here
	if !errors.As(err, &refused) {
		return
	}
	var told []string
	for _, r := range refused.Refusals {
		if name := r.Limit.word(); !slices.Contains(told, name) {
			told = append(told, name)
			to.Event(ctx, observe.Event{Kind: observe.LimitRefused, Name: name})
		}
	}
}

// observedEach is a call whose results are each an answer.
func (l *Ledger) observedEach(ctx context.Context, name string,
	each func(context.Context) ([]Result, error)) ([]Result, error) {
	ctx, span := l.begin(ctx, name)
	results, err := each(ctx)
	l.tellResults(ctx, results)
	span.End(err)
	return results, err
}

// tellResults reports the refusals in a batch.
func (l *Ledger) tellResults(ctx context.Context, results []Result) {
	if l.observer == nil {
		return
	}
	for _, r := range results {
		tellRefused(ctx, l.observer, r.Err)
	}
}

// word is the name of a limit for an observer.
func (l Limit) word() string {
	switch {
	case l.Name != "":
		return l.Name
	case l.Prepaid:
		return "credit"
	case l.Lifetime:
		return "lifetime"
	case !l.Period.IsZero():
		return l.Period.word()
	}
	return l.Window.String()
}
