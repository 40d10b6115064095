package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestPseudonymize_FromTheCommandLine(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	l := cli(t, pool)
	before := l.exits(exitDone, "export", "--subject", "ann").objects()
	require.NotEmpty(t, before)
	for _, row := range before {
		require.NotEmpty(t, row["table"])
		require.NotEmpty(t, row["row"])
	}
	require.Contains(t, l.ok("export", "--subject", "42", "--table", "river_job"), `"table":"public.river_job"`)
	l.exits(exitUsage, "export")
	l.exits(exitUsage, "pseudonymize", "--subject", "ann", "--alias", "a b", "--yes")
	l.exits(exitUsage, "pseudonymize", "--subject", "ann", "--alias", "gone/1", "--max-rows", "-1", "--yes")
	l.exits(exitRefused, "pseudonymize", "--subject", "ann", "--alias", "gone/1")
	as(t, pool, metered.GrantSQL).exits(exitNotGranted, "pseudonymize", "--subject", "ann", "--alias", "gone/1", "--yes")
	require.Len(t, l.exits(exitDone, "export", "--subject", "ann").objects(), len(before), "nothing was done")

	require.Contains(t, l.ok("pseudonymize", "--subject", "ann", "--alias", "gone/1", "--max-rows", "1", "--yes"), "renamed.")
	require.Empty(t, l.ok("export", "--subject", "ann"))
	require.Len(t, l.exits(exitDone, "export", "--subject", "gone/1").objects(), len(before))
	pgtest.RequireVerified(t, pool, c.Budget)

	execute(t, pool, `insert into metered.packed_rows values ('t', 1, 1, 'ledger', '(1,user/ann)')`)
	r := l.exits(exitRefused, "pseudonymize", "--subject", "user/ann", "--alias", "gone/2", "--yes")
	require.Contains(t, r.out, "a row of ledger is on its way to another cell")
	require.Equal(t, false, l.exits(exitRefused, "pseudonymize", "--subject", "user/ann", "--alias", "gone/2", "--yes", "--json").objects()[0]["done"])
	require.Contains(t, strings.ToLower(l.ok("help", "exit-codes")), "pseudonymize")
}
