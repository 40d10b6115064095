package tokens_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// A plan made while there were no tokens, or few, is right for many tokens of one subject, with or without statistics:
// each call reads only the tokens that it names.
func TestPlans_AreRightFromTheFirstTokenOn(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, rows := range pgtest.Size([]int{0, 3000}, []int{0, 30, 300, 3000}) {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d rows, analysed %v", rows, analysed), func(t *testing.T) {
				t.Parallel()
				pool, store := pgtest.Open(t), newStore(t)
				_, err := pool.Exec(ctx, `alter table metered.tokens set (autovacuum_enabled = off)`)
				require.NoError(t, err)
				_, err = pool.Exec(ctx, `insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
					select sha256(('first ' || g)::bytea), now(), now() + interval '1 h', 1, 'p', 's' from generate_series(1, $1) g`, rows)
				require.NoError(t, err)
				if analysed {
					_, err = pool.Exec(ctx, `analyze metered.tokens`)
					require.NoError(t, err)
				}
				conn, err := pool.Acquire(ctx)
				require.NoError(t, err)
				defer conn.Release()
				do := func(f func(tx pgx.Tx) error) { require.NoError(t, pgx.BeginFunc(ctx, conn, f)) }
				minted := func(subject string) (m tokens.Minted) {
					do(func(tx pgx.Tx) (err error) {
						m, err = store.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: subject, TTL: time.Hour})
						return err
					})
					return m
				}
				calls := map[string]func(){
					"mint": func() { minted("s") },
					"consume": func() {
						m := minted("s")
						do(func(tx pgx.Tx) error {
							_, err := store.Consume(ctx, tx, "p", "s", m.Token.Reveal())
							return err
						})
					},
					"inspect": func() {
						_, err := store.Inspect(ctx, conn, "p", "s", minted("s").Token.Reveal())
						require.NoError(t, err)
					},
					"revoke": func() {
						m := minted("s")
						do(func(tx pgx.Tx) error {
							_, err := store.Revoke(ctx, tx, m.Digest)
							return err
						})
					},
					"revoke all": func() {
						minted("other")
						do(func(tx pgx.Tx) error {
							_, err := store.RevokeSubject(ctx, tx, "p", "other")
							return err
						})
					},
					"replace": func() {
						do(func(tx pgx.Tx) error {
							_, err := store.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "another", TTL: time.Hour})
							return err
						})
					},
					"purge": func() {
						_, err := conn.Exec(ctx, `select metered.purge_tokens(null, metered.clock() - interval '1 h', 5)`)
						require.NoError(t, err)
					},
				}
				var before int64
				reads := func(f func()) int64 {
					f()
					pgtest.FlushStatistics(t, conn)
					last := before
					require.NoError(t, conn.QueryRow(ctx, `select sum(idx_tup_read + 1000000 * (select seq_scan from pg_stat_user_tables where relname = 'tokens'))::bigint
						from pg_stat_user_indexes where relname = 'tokens'`).Scan(&before))
					return before - last
				}
				for name, call := range calls {
					for range 7 { // past the plans that would be made for their values
						call()
					}
					reads(func() {})
					t.Logf("%s reads %d entries of few", name, reads(call))
				}
				_, err = pool.Exec(ctx, `insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
					select sha256(g::text::bytea), now() - ago, now() - ago + interval '1 h', 1, 'p', 's'
					from generate_series(1, 10000) g, lateral (select g % 2 * interval '3 h') a(ago)`)
				require.NoError(t, err)
				for name, call := range calls {
					require.LessOrEqual(t, reads(call), int64(60), name)
				}
			})
		}
	}
}
