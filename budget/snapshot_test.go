package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// A transaction with an old snapshot saw the scope with so many entries; since
// then 64 more were added, and all that can be purged was: also every entry that
// a charge on the old state would collide with, but for entry 1.
func TestCharge_OldSnapshotNeverGetsPastAPurge(t *testing.T) {
	t.Parallel()
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, clock := open(t)
			total := budget.Limit{Max: 50}
			for _, seen := range []int{0, 1, 2, 3, 15, 16, 17, 18, 33, 40} {
				scope := fmt.Sprintf("seen %d", seen)
				chargeMany(t, pool, l, scope, seen)
				var old [3]pgx.Tx
				for i := range old {
					old[i] = begin(t, pool, iso)
					require.Equal(t, int64(seen), usage(t, old[i], l, scope, 0).Seq) // takes the snapshot
				}
				chargeMany(t, pool, l, scope, 64)
				clock.Advance(time.Hour)
				purge(t, pool, l, time.Minute)

				_, err := l.Charge(ctx, old[0], budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{total}})
				require.Equal(t, sqlstate.SerializationFailure, code(err), "charge after seeing %d: %v", seen, err)
				_, err = l.Credit(ctx, old[1], budget.Credit{Scope: scope, Amount: 1})
				require.Equal(t, sqlstate.SerializationFailure, code(err), "credit after seeing %d: %v", seen, err)
				if seen > 0 {
					_, err = l.Refund(ctx, old[2], budget.Refund{Scope: scope, Seq: 1, Amount: 1})
					require.Equal(t, sqlstate.SerializationFailure, code(err), "refund after seeing %d: %v", seen, err)
				}
				for _, tx := range old {
					require.NoError(t, tx.Rollback(ctx))
				}
				require.Equal(t, int64(seen+64), usage(t, pool, l, scope, 0).Used)
			}
			requireVerified(t, pool, l)
		})
	}
}
