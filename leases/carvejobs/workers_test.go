package carvejobs

import (
	"context"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// Each job that fails reports the reason and is tried again. One that River stops is tried again, and has no reason.
func TestWork_ReportsNoStop(t *testing.T) {
	t.Parallel()
	for name, deadline := range map[string]time.Time{"stopped": time.Now().Add(time.Hour), "timed out": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var reported []error
			c, err := New(nil, Config{OnError: func(err error) { reported = append(reported, err) }})
			require.NoError(t, err)
			w := &worker[endArgs]{clusters: c, step: func(ctx context.Context, _ endArgs, _ budget.Note) error { return ctx.Err() }}
			ctx, stop := context.WithDeadline(t.Context(), deadline)
			stop()
			require.Equal(t, river.JobSnooze(5*time.Second), w.Work(ctx, &river.Job[endArgs]{JobRow: &rivertype.JobRow{}}))
			require.Equal(t, name == "timed out", len(reported) == 1, reported)
		})
	}
}
