package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A report's units of each lot add up, and the lot's moves add up to the units left.
func TestReports_SayWhereCreditWent(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 100})
	f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Reference: "hour", Category: "promotional"})
	f.grant(wallet.Grant{Amount: 20, Ends: wallet.After(2 * time.Hour), Reference: "rolls", Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(400 * day)}})
	f.grant(wallet.Grant{Amount: 30, Reference: "bounced"})
	f.draw(4)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
		return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "bounced"})
	})
	require.NoError(t, err)
	f.clock.Set(noon.Add(3 * time.Hour))
	f.refund(f.draw(3).Seq, 1)
	f.draw(13) // ten of which are overdraft
	f.grant(wallet.Grant{Amount: 50, Reference: "new"})

	role := pgtest.AsRole(t, f.pool, metered.GrantReportingSQL, "")
	rows, err := role.Query(t.Context(), `
		select coalesce(reference, origin), state, granted, rest, drawn, held, lapsed, revoked, rolled, expires_at is null
		from metered.lots_words where scope = 'ann' order by granted_seq`)
	require.NoError(t, err)
	lots, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
	require.NoError(t, err)
	require.Equal(t, [][]any{
		{"hour", "ended", int64(10), int64(0), int64(4), int64(0), int64(6), int64(0), int64(0), false},
		{"rolls", "ended", int64(20), int64(0), int64(0), int64(0), int64(15), int64(0), int64(5), false},
		{"bounced", "revoked", int64(30), int64(0), int64(0), int64(0), int64(0), int64(30), int64(0), true},
		{"rolled over", "used up", int64(5), int64(0), int64(5), int64(0), int64(0), int64(0), int64(0), false},
		{"new", "open", int64(50), int64(40), int64(10), int64(0), int64(0), int64(0), int64(0), true},
	}, lots)

	var wrong []string
	require.NoError(t, role.QueryRow(t.Context(), `
		select array(select y.no || ': ' || y.rest || ' is not ' || coalesce(sum(m.change), 0)
			from metered.lots_words y left join metered.lots_statement m on m.scope = 'ann' and m.lot = y.no
			where y.scope = 'ann' group by y.no, y.rest having y.rest <> coalesce(sum(m.change), 0)
			union all
			select 'the entry of ' || y.no from metered.lots_words y where not exists (
				select from metered.lots_statement m where m.scope = y.scope and m.lot = y.no and m.seq = y.granted_seq and m.does = 'credited' and m.amount = y.granted))`).Scan(&wrong))
	require.Empty(t, wrong)

	var kinds []string
	require.NoError(t, role.QueryRow(t.Context(), `
		select array(select coalesce(m.reference, case when m.lot is null then 'overdraft' else 'rolled' end) || ' ' || m.does || ' ' || m.amount
			from metered.lots_statement m where m.scope = 'ann' and m.seq > 3 order by m.seq, m.nth)`).Scan(&kinds))
	require.Equal(t, []string{"hour taken 4", "bounced revoked 30", "hour lapsed 6", "rolls rolled over 5", "rolled credited 5", "rolls lapsed 15",
		"rolled taken 3", "rolled given back 1", "rolled taken 3", "overdraft taken 10", "new credited 50", "new paid back 10"}, kinds)

	var balance int64
	var ends *time.Time
	require.NoError(t, role.QueryRow(t.Context(), `select balance, lots_end from metered.scopes where scope = 'ann'`).Scan(&balance, &ends))
	require.EqualValues(t, 40, balance)
	require.WithinDuration(t, noon.Add(400*day+2*time.Hour), *ends, 0, "which may be of a lot that was drawn empty since")
}
