package main

import (
	"io"
	"strings"
	"syscall"
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
	lost := cli(t, pool).exits(exitFailed, "feed", "--after", "1.1000").err
	require.Contains(t, lost, "of a server that was lost")
	start := strings.TrimSpace(lost[strings.LastIndex(lost, " "):])
	require.Len(t, cli(t, pool).objects("feed", "--after", start, "--limit", "1"), 1, "the message says where to go on")
}

// What was not printed is not consumed.
func TestFeed_GoesOnForAConsumer(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	all := pgtest.Count(t, pool, "metered.ledger")
	consumed := func() int {
		return pgtest.Value[int](t, pool, "select coalesce(max(consumed), -1)::int from metered.feed_lag")
	}
	broken := streams{in: strings.NewReader(""), out: brokenPipe{}, err: io.Discard}
	require.Equal(t, exitFailed, run(t.Context(), []string{"feed", "--consumer", "warehouse", "-d", cli(t, pool).url}, broken))
	require.Equal(t, -1, consumed())
	require.Len(t, as(t, pool, metered.GrantSQL).objects("feed", "--consumer", "warehouse"), all)
	require.Equal(t, all, consumed())
	require.Empty(t, cli(t, pool).ok("feed", "--consumer", "warehouse"))

	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	_, err = ledger.ChargeNow(t.Context(), pool, budget.Charge{Scope: "new", Amount: 1})
	require.NoError(t, err)
	l := cli(t, pool)
	l.until = func(out string) bool { return strings.Contains(out, "new") }
	require.Len(t, l.exits(exitInterrupted, "feed", "--consumer", "warehouse", "--follow", "--every", "1ms", "--json").objects(), 1)
	require.Empty(t, cli(t, pool).ok("feed", "--consumer", "late", "--from-now"))

	require.Contains(t, as(t, pool, metered.GrantReportingSQL).exits(exitNotGranted, "feed", "--consumer", "warehouse").err, "lacks the application grants")
	cli(t, pool).exits(exitUsage, "feed", "--from-now")
	cli(t, pool).exits(exitUsage, "feed", "--consumer", "warehouse", "--after", "1.1")
	pgtest.Execute(t, pool, "insert into metered.feed_purged values (1)")
	pgtest.Execute(t, pool, "update metered.feed_consumers set no = 0 where consumer = 'warehouse'")
	require.Contains(t, cli(t, pool).exits(exitFailed, "feed", "--consumer", "warehouse").err, "drop the consumer")
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }
