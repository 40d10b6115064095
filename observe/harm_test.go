package observe_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/observe"
)

// broken panics wherever it is called.
type broken struct{ in atomic.Int64 }

func (b *broken) Start(context.Context, observe.Op) (context.Context, func(observe.End)) {
	if b.in.Add(1)%2 == 0 {
		panic("Start")
	}
	return nil, func(observe.End) { panic("End") }
}

func (*broken) Event(context.Context, observe.Event) { panic("Event") }

// Not parallel, for the default logger.
func TestObserver_ThatPanicsChangesNothing(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &broken{}}})
	cmd := pgtest.Whole(t, pool, c, "op")
	_, err := metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
	require.NoError(t, err)
	require.Equal(t, pgtest.Everything, pgtest.FootprintOf(t, pool, cmd))
	require.Zero(t, pool.Stat().AcquiredConns())
	require.GreaterOrEqual(t, strings.Count(log.String(), "the observer panics"), 1)
	require.LessOrEqual(t, strings.Count(log.String(), "the observer panics"), 4, "once for each piece")
}

// slow waits in one place until it is let go.
type slow struct {
	observe.Observer
	at chan struct{}
}

func (s slow) Start(ctx context.Context, op observe.Op) (context.Context, func(observe.End)) {
	if op.Work == observe.Flush && op.Name == "complete" {
		s.at <- struct{}{}
		<-s.at
		return ctx, func(observe.End) { s.at <- struct{}{}; <-s.at }
	}
	return ctx, nil
}

func (slow) Event(context.Context, observe.Event) {}

func TestObserver_ThatIsSlowKeepsNoScopeLocked(t *testing.T) {
	t.Parallel()
	s := slow{at: make(chan struct{})}
	pool, slowly := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: s}})
	c := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{LockTimeout: 5 * time.Second}})
	do := func(c *metered.Client, id string) error {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id, Charges: []budget.Charge{pgtest.Charge("hot", 1, 10)}},
			func(context.Context, *metered.Tx) (any, error) { return nil, nil })
		return err
	}
	done := make(chan error, 1)
	go func() { done <- do(slowly, "slow") }()
	<-s.at
	require.NoError(t, do(c, "while the last flush is to be sent"))
	s.at <- struct{}{}
	<-s.at
	require.Equal(t, int64(2), pgtest.Used(t, pool, c, "hot"), "it is committed")
	require.NoError(t, do(c, "while its end is told"))
	s.at <- struct{}{}
	require.NoError(t, <-done)
}

func TestObserver_NoneAllocatesNothing(t *testing.T) {
	var none *observed.To
	err := error(budget.ErrExceeded)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		ctx, span := none.Start(t.Context(), observe.Op{Work: observe.Command, Name: "a", ID: "b"})
		none.Event(ctx, observe.Event{Kind: observe.LimitRefused, N: 1})
		none.Retried(ctx, err)
		none.Never(ctx, err, err)
		none.Purged(ctx, "a", 1)
		span.With(observe.End{Err: err, Rows: 1})
		span.End(err)
	}))
}
