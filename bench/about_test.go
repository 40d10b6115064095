package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

func TestCheckServer_WarnsOfCommitsThatAreNotDurable(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{false, true} {
		server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: durable})
		require.NoError(t, err)
		defer server.Stop()
		b := quiet(server.ConnString())
		var log strings.Builder
		b.log = &log
		require.NoError(t, b.checkServer(t.Context()))
		require.Equal(t, !durable, strings.Contains(log.String(), "fsync, full_page_writes, synchronous_commit off"), log.String())
	}
}
