// Package pause waits before an attempt is made again.
package pause

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Before waits before attempt n+1: a random time up to 2^n ms, 200 ms at most. It returns early,
// with the reason, when ctx is done.
func Before(ctx context.Context, n int) error {
	limit := min(200*time.Millisecond, time.Millisecond<<min(n, 20))
	timer := time.NewTimer(rand.N(limit) + 1)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return Ended(ctx)
	}
}

// Ended is why ctx is done, and the cause that its owner gave, if it is another.
func Ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}
