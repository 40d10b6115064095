package command

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An error of the context's deadline names it already.
func TestTimedOut_NamesTheDeadlineOnce(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	err := timedOut(ctx, fmt.Errorf("metered: complete: timeout: %w", ctx.Err()))
	require.ErrorIs(t, err, ErrTimeout)
	require.EqualError(t, err, "metered: timeout: metered: complete: timeout: context deadline exceeded")
}
