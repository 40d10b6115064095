package holds_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func seat(name string) holds.Key { return holds.Key{Type: "seat", Value: name} }

// asking counts the queries of a call.
type asking struct {
	budget.Querier
	queries int
}

func (a *asking) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	a.queries++
	return a.Querier.Query(ctx, sql, args...)
}

func TestClaimed_HasTheKeysThatSomebodyHas(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	claim := func(tenant, name string, ttl time.Duration) holds.Hold {
		h, err := f.claim(holds.Claim{Tenant: tenant, Key: seat(name), Holder: "ann", TTL: ttl})
		require.NoError(t, err)
		return h
	}
	held := claim("", "held", time.Hour)
	claim("", "expired", time.Minute)
	claim("", "swept", time.Minute)
	_, err := f.release(claim("", "released", time.Hour).ID)
	require.NoError(t, err)
	confirmed, returned := claim("", "confirmed", time.Hour), claim("", "returned", time.Hour)
	_, err = f.capture(holds.Capture{IDs: []string{confirmed.ID, returned.ID}, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, returned.ID))
	require.NoError(t, err)
	claim("other", "never", time.Hour)
	f.clock.Advance(time.Minute)
	swept := claim("", "swept", time.Hour) // the next generation

	keys := []holds.Key{seat("never")}
	for _, name := range []string{"held", "expired", "swept", "released", "confirmed", "returned", "held"} {
		keys = append(keys, seat(name))
	}
	db := &asking{Querier: f.pool}
	claimed, err := f.book.Claimed(t.Context(), db, "", keys...)
	require.NoError(t, err)
	require.Equal(t, 1, db.queries)
	want := map[holds.Key]holds.Hold{}
	for key, id := range map[string]string{"held": held.ID, "swept": swept.ID, "confirmed": confirmed.ID} {
		want[seat(key)] = f.get(id)
	}
	require.Equal(t, want, claimed)

	claimed, err = f.book.Claimed(t.Context(), f.pool, "other", seat("never"), seat("held"))
	require.NoError(t, err)
	require.Len(t, claimed, 1)
	claimed, err = f.book.Claimed(t.Context(), f.pool, "")
	require.NoError(t, err)
	require.Empty(t, claimed)

	var argument *budget.ArgumentError
	_, err = f.book.Claimed(t.Context(), untouchable{}, "", seat("a"), seat(""))
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "keys[1].Value", argument.Field)
	_, err = f.book.Claimed(t.Context(), untouchable{}, "\xff", seat("a"))
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Tenant", argument.Field)
	_, err = f.book.Claimed(t.Context(), untouchable{}, "", make([]holds.Key, bounds.MaxKeys+1)...)
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "keys", argument.Field)
}

// Also in a session that asked when there were few, each key is found by the index.
func TestClaimed_ReadsNoMoreTheMoreHoldsThereAre(t *testing.T) {
	t.Parallel()
	for _, few := range pgtest.Size([]int{0, 3000}, []int{0, 30, 300, 3000}) {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d holds, analysed %v", few, analysed), func(t *testing.T) {
				t.Parallel()
				claimedIsByIndex(t, few, analysed)
			})
		}
	}
}

func claimedIsByIndex(t *testing.T, few int, analysed bool) {
	f := setUp(t, holds.Config{})
	execute(t, f.pool, `alter table metered.holds set (autovacuum_enabled = off)`)
	if few > 0 {
		f.crowd("room", few, time.Hour, true)
	}
	if analysed {
		execute(t, f.pool, `analyze metered.holds`)
	}
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	var keys []holds.Key
	for i := range 50 {
		keys = append(keys, seat(fmt.Sprint(i)))
	}
	ask := func() {
		claimed, err := f.book.Claimed(t.Context(), conn, "", keys...)
		require.NoError(t, err)
		require.Len(t, claimed, 1)
	}
	_, err = f.claim(holds.Claim{Key: keys[7], Holder: "ann"})
	require.NoError(t, err)
	for range 10 {
		ask()
	}
	f.crowd("room", pgtest.Size(8_000, 20_000), 2*time.Hour, true)
	scans := func() (n int) {
		pgtest.FlushStatistics(t, conn)
		require.NoError(t, conn.QueryRow(t.Context(), `select seq_scan + seq_tup_read from pg_stat_user_tables
			where schemaname = 'metered' and relname = 'holds'`).Scan(&n))
		return n
	}
	before := scans()
	ask()
	require.Equal(t, before, scans())
}

func TestTaken_SaysWhenToComeAgain(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	h, err := f.claim(holds.Claim{Key: seat("a"), Holder: "ann", TTL: time.Minute})
	require.NoError(t, err)
	var taken *holds.TakenError
	_, err = f.claim(holds.Claim{Key: seat("a"), Holder: "ben"})
	require.ErrorAs(t, err, &taken)
	require.False(t, taken.Confirmed)
	require.Equal(t, time.Minute, taken.RetryAfter)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.NoError(t, err)
	_, err = f.claim(holds.Claim{Key: seat("a"), Holder: "ben"})
	require.ErrorAs(t, err, &taken)
	require.True(t, taken.Confirmed)
	require.Zero(t, taken.RetryAfter)
}

// Two calls in one transaction, against two in another the other way round, and the same as one call each.
func TestPlace_TwoInOneTransactionCanDeadlockAndSaySo(t *testing.T) {
	t.Parallel()
	for what, call := range map[string]func(f *fixture, tx pgx.Tx, name string) error{
		"place": func(f *fixture, tx pgx.Tx, name string) error {
			_, err := f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity(name, 1, 9)}})
			return err
		},
		"claim": func(f *fixture, tx pgx.Tx, name string) error {
			_, err := f.book.Claim(t.Context(), tx, holds.Claim{Key: seat(name), Holder: "ann", TTL: time.Minute})
			return err
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			one, two := begin(t, f.pool, pgx.ReadCommitted), begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, call(f, one, "a"))
			require.NoError(t, call(f, two, "b"))
			first := pgtest.Going(func() error {
				err := call(f, one, "b")
				_ = one.Rollback(context.Background())
				return err
			})
			pgtest.WaitQueued(t, f.pool, 1)
			errTwo := call(f, two, "a")
			_ = two.Rollback(context.Background())
			err := <-first
			if err == nil {
				err = errTwo
			}
			require.Equal(t, "40P01", code(err), err)
			require.ErrorContains(t, err, ": "+what+": ")
			require.ErrorIs(t, err, budget.ErrSerialization)
			require.NotContains(t, err.Error(), "budget")
		})
	}
}

// A role that calls the functions itself can claim a scope that no Key makes.
func TestClaim_OfAnyScopeKeepsNobodyFromReading(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	_, err := f.pool.Exec(t.Context(), `select metered.place(
		('', 'by hand', false, null, '', 'a', decode(repeat('00', 33), 'hex'), null, '1 min', '0', '1 hour', null, null)::metered.new_hold,
		array[('a', null, 1, 1, '{}', null, false, null, null)::metered.new_charge], '1 min', 1000, (null, null, null)::metered.origin, null, false)`)
	require.NoError(t, err)
	all, err := f.book.List(t.Context(), f.pool, holds.Filter{})
	require.NoError(t, err)
	require.Len(t, all.Holds, 1)
	require.Nil(t, all.Holds[0].Claim)
}

// With Reveal, the refusal of a taken key has the same answer as Claimed, for a held claim and for a confirmed one.
// Without it, the refusal does not name the holder. Both hold for a raised error too, as in a command.
func TestTaken_NamesTheHolderWithReveal(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		f := setUp(t, holds.Config{})
		mine, err := f.claim(holds.Claim{Key: seat("a"), Holder: "ann", Metadata: []byte(`{"note": "\u0000"}`)})
		require.NoError(t, err)
		for _, confirmed := range []bool{false, true} {
			if confirmed {
				_, err = f.capture(holds.Capture{IDs: []string{mine.ID}, All: true})
				require.NoError(t, err)
			}
			want := f.claimed(seat("a"))
			for _, reveal := range []bool{false, true} {
				for _, raising := range []bool{false, true} {
					call, err := claimHold(f.book, holds.Claim{Key: seat("a"), Holder: "ben", TTL: time.Minute, Reveal: reveal})
					require.NoError(t, err)
					tx := begin(t, f.pool, iso)
					_, err = call.Scan(tx.QueryRow(t.Context(), call.SQL, call.Args(sending(raising))...))
					require.NoError(t, tx.Rollback(context.Background()))
					var taken *holds.TakenError
					require.ErrorAs(t, err, &taken)
					require.Equal(t, seat("a"), taken.Key)
					require.Equal(t, confirmed, taken.Confirmed)
					require.NotContains(t, err.Error(), "ann")
					if !reveal {
						require.Nil(t, taken.By)
						continue
					}
					require.Equal(t, &want, taken.By)
					require.Equal(t, []any{mine.ID, "ann", mine.Deadline}, []any{taken.By.ID, taken.By.Holder, taken.By.Deadline})
				}
			}
		}
	}
}
