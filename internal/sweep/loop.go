// Package sweep runs sweeps: of holds, and of lots of wallets. Scopes with little that is due share
// transactions. A scope that is behind has more than one step writes. It gets a transaction for each
// step, in turn with others.
package sweep

import (
	"context"
	"fmt"
	"slices"
)

// maxBehind is the most scopes that are behind and are swept in turn, or left.
const maxBehind = 10_000

// Loop is a sweep. Page and Step run a transaction each.
type Loop struct {
	// Max is the most transactions. Zero is no bound.
	Max int

	// Page ends what is due in scopes that are not behind, and returns the scopes that are. It may
	// pass over those that are known to be. more says that there may be another page.
	Page func(ctx context.Context, known []string) (behind []string, more bool, err error)

	// Step ends what is due first in a scope that is behind, and reports whether more is due. left
	// says that it did nothing, because the scope is locked.
	Step func(ctx context.Context, scope string) (more, left bool, err error)

	// Of is what a scope is called in errors.
	Of string

	batches int
	left    []string // scopes that were locked, or whose step failed
	behind  []string // in turn
	again   []string // those of them that are behind after the step of this round
	errs    []error
}

// Run sweeps in rounds: pages, and then a step of each scope that is behind. A scope whose lock is
// not free, or whose step fails, is left for the next sweep, and stops no other. left counts the
// scopes that are behind at the end. What was committed stays, if a later transaction fails or ctx
// ends.
func (l *Loop) Run(ctx context.Context) (left int, errs []error) {
	if err := l.run(ctx); err != nil {
		l.errs = append(l.errs, err)
	}
	return len(l.left) + len(l.behind), l.errs
}

func (l *Loop) run(ctx context.Context) error {
	more := true
	for (more || len(l.behind) > 0) && len(l.left) < maxBehind {
		for more = true; more && len(l.left)+len(l.behind) < maxBehind; {
			if l.ends() {
				return nil
			}
			var behind []string
			var err error
			known := slices.Concat(l.left, l.behind)
			if behind, more, err = l.Page(ctx, known); err != nil {
				return err
			}
			l.batches++
			for _, scope := range behind {
				if !slices.Contains(known, scope) {
					l.behind = append(l.behind, scope)
				}
			}
		}
		if err := l.round(ctx); err != nil || l.ends() {
			return err
		}
	}
	return nil
}

// ends reports whether the sweep came to its last transaction.
func (l *Loop) ends() bool { return l.Max > 0 && l.batches >= l.Max }

// round takes a step of each scope that is behind.
func (l *Loop) round(ctx context.Context) error {
	for i, scope := range l.behind {
		if l.ends() {
			l.behind, l.again = append(l.again, l.behind[i:]...), nil
			return nil
		}
		more, left, err := l.Step(ctx, scope)
		switch {
		case err != nil && ctx.Err() != nil:
			l.behind, l.again = append(l.again, l.behind[i:]...), nil
			return err
		case err != nil:
			l.errs = append(l.errs, fmt.Errorf("%s %q: %w", l.Of, scope, err))
			l.left = append(l.left, scope)
			continue
		case left:
			l.left = append(l.left, scope)
		case more:
			l.again = append(l.again, scope)
		}
		l.batches++
	}
	l.behind, l.again = l.again, nil
	return nil
}
