package savepoint_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/savepoint"
)

// slow is a transaction whose server takes its time for a rollback, which ends with its context.
type slow struct {
	pgx.Tx
	takes time.Duration
	err   error
}

func (s *slow) Begin(context.Context) (pgx.Tx, error) { return s, nil }

func (s *slow) Conn() *pgx.Conn { return nil }

func (s *slow) Rollback(ctx context.Context) error {
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		s.err = ctx.Err()
	}
	return s.err
}

// A rollback that is cut off closes the connection, and its owner's transaction with it. So it is
// waited for as long as the owner waits, and for 5 seconds once that has given up.
func TestIn_ARollbackMayTakeAsLongAsItsCallerWaits(t *testing.T) {
	for _, test := range []struct{ takes, waits, after time.Duration }{
		{takes: time.Minute, waits: time.Hour, after: time.Minute},
		{takes: time.Minute, waits: 59 * time.Second, after: time.Minute},
		{takes: time.Minute, waits: 50 * time.Second, after: 55 * time.Second},
		{takes: time.Minute, waits: 0, after: 5 * time.Second},
		{takes: time.Second, waits: 0, after: time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), test.waits)
			defer cancel()
			tx, began := &slow{takes: test.takes}, time.Now()
			_, err := savepoint.In(ctx, tx, "test", func(pgx.Tx) (any, error) { return nil, context.Canceled })
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, test.after, time.Since(began), test)
			require.Equal(t, test.after < test.takes, tx.err != nil, test)
		})
	}
}
