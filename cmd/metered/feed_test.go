package main

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestFeed_ListsAllEntriesAndWhoReadsThem(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	require.Empty(t, as(t, pool, metered.GrantReportingSQL).ok("feed"), "nothing has a number, and this role gives none")
	all := cli(t, pool).objects("feed", "--limit", "0", "--json")
	require.Len(t, all, pgtest.Count(t, pool, "metered.ledger"))
	for i, e := range all {
		require.Equal(t, float64(i+1), e["number"])
		require.NotEmpty(t, e["scope"])
	}
	require.Contains(t, as(t, pool, metered.GrantReportingSQL).ok("feed", "--limit", "1"), all[0]["scope"])
	require.Len(t, cli(t, pool).objects("feed", "--after", all[2]["cursor"].(string), "--limit", "3"), 3)

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := ledger.ConsumeFeed(t.Context(), tx, "invoices", budget.FeedOptions{Max: 2})
		return err
	}))
	consumer := cli(t, pool).objects("feed", "--consumers")[0]
	require.Equal(t, "invoices", consumer["name"])
	require.Equal(t, float64(len(all)-2), consumer["unread"])
	require.Contains(t, cli(t, pool).ok("feed", "--consumers"), "7d")
	cli(t, pool).exits(exitUsage, "feed", "--after", "x")
	cli(t, pool).exits(exitUsage, "feed", "--every", "0s")
	require.Contains(t, cli(t, pool).exits(exitFailed, "feed", "--after", "1.1000").err, "of a server that was lost")
}

func TestFeed_FollowsUntilItIsInterrupted(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	before := pgtest.Count(t, pool, "metered.ledger")
	l := cli(t, pool)
	charged := false
	l.until = func(out string) bool {
		lines := strings.Count(out, "\n")
		if lines == before && !charged {
			charged = true
			_, err := ledger.ChargeNow(t.Context(), pool, budget.Charge{Scope: "new", Amount: 1})
			require.NoError(t, err)
		}
		return lines > before
	}
	all := l.exits(exitInterrupted, "feed", "--follow", "--every", "1ms", "--json").objects()
	require.Equal(t, "new", all[before]["scope"])
	require.Len(t, all, before+1)
}
