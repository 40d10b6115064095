package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

// A comparison is only fair among contenders that leave the same rows. Each of a group is compared with its first.
func TestContenders_WriteTheSameRows(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{})
	require.NoError(t, err)
	defer server.Stop()
	b := quiet(server.ConnString())
	b.owned = server.Owned()
	defer b.close()
	k, err := b.kit(t.Context(), options{conns: 4}, hotScope)
	require.NoError(t, err)
	defer k.drop()
	for _, group := range []struct {
		tables []string // an op leaves a row in each of them, as often as it is named
		ways   []entry
	}{
		{[]string{"metered.ledger"}, []entry{
			{name: "charge", make: chargeMetered}, {name: "charge floor", make: chargeFloor},
			{name: "charge quiet", make: chargeQuiet},
		}},
		{[]string{"metered.ledger", "metered.operations", "metered.tokens", "river_job"}, []entry{
			{name: "command", make: commandMetered}, {name: "command floor", make: commandFloor},
			{name: "command locked", make: commandLockedFloor}, {name: "command released", make: commandReleased},
		}},
		{[]string{"metered.bench_history"}, []entry{{name: "charge counter", make: chargeCounter}}},
		{[]string{"metered.bench_history", "metered.bench_keys"}, []entry{{name: "command counter", make: commandCounter}}},
		{[]string{"metered.tokens"}, []entry{{name: "consume", make: tokenConsume}, {name: "update", make: tokenUpdate}}},
		{[]string{"river_job"}, []entry{{name: "keyless", make: enqueue(false)}, {name: "river", make: riverInsert}}},
	} {
		want := k.leaves(t, group.ways[0].make, group.tables)
		for _, w := range group.ways[1:] {
			got := k.leaves(t, w.make, group.tables)
			require.Equal(t, want, got, "%s and %s", group.ways[0].name, w.name)
		}
	}
}

// leaves are the likenesses of the values that some ops of a contender leave in each column.
func (k *kit) leaves(t *testing.T, make func(*kit) contender, tables []string) map[string]bool {
	const ops = 20
	all := []string{
		"metered.ledger", "metered.refund_sum", "metered.operations", "metered.tokens", "metered.job_keys", "metered.holds", "river_job",
		"metered.bench_history", "metered.bench_keys",
	}
	// Ids of jobs, which are results too, are of one length.
	for _, sql := range []string{"truncate " + strings.Join(all, ", "), "alter sequence river_job_id_seq restart 1000"} {
		_, err := k.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	k.minted = nil
	con := make(k)
	if con.stock != nil {
		require.NoError(t, con.stock(t.Context(), ops))
	}
	n, _, err := drive(t.Context(), con.op, 4, time.Minute, ops)
	require.NoError(t, err)
	require.Equal(t, ops, n)
	likes := map[string]bool{}
	for _, table := range all {
		rows, err := k.Query(t.Context(), "select * from "+table)
		require.NoError(t, err)
		found, err := pgx.CollectRows(rows, pgx.RowToMap)
		require.NoError(t, err)
		times := len(slices.DeleteFunc(slices.Clone(tables), func(name string) bool { return name != table }))
		require.Len(t, found, times*ops, table)
		for _, row := range found {
			for column, v := range row {
				if strings.HasPrefix(column, "anchor_") {
					continue // 16 bytes that the library's charges alone write
				}
				likes[table+"."+column+": "+likeness(v)] = true
			}
		}
	}
	var rest int // tokens that are not used, and results that are no job's
	err = k.QueryRow(t.Context(), `select (select count(*) from metered.tokens where used <> 1) +
		(select count(*) from metered.operations where convert_from(result, 'utf8') not in (select id::text from river_job))`).Scan(&rest)
	require.NoError(t, err)
	require.Zero(t, rest)
	return likes
}

// likeness is the part in which two values must agree: whether they are null, and their length. Ids, times and numbers differ.
func likeness(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return fmt.Sprintf("text of %d", len(v))
	case []byte:
		return fmt.Sprintf("bytes of %d", len(v))
	case []any:
		text := fmt.Sprintf("array of %d", len(v))
		for _, element := range v {
			text += ", " + likeness(element)
		}
		return text
	case map[string]any: // JSON
		return fmt.Sprint(v)
	}
	return fmt.Sprintf("%T", v)
}
