package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestClusters(t *testing.T) {
	t.Parallel()
	require.Equal(t, `The cluster eu has a budget of 1000 units. 400 of them are carved for the cluster us.
Both sell at the same time, each on its own disk: 200 in eu, 150 in us.
us is killed (-9).
A sale in us fails: true. Nobody has to know whether it was made: its id is sent again later.
eu goes on, and sells its 400 others. The next sale is refused: 400 units are leased, to us.
us is back. The sale that failed is sent twice, and made once; with 4 more, us has sold 200.
us is closed. A sale there is refused: true.
eu hears that 200 of 400 were used: 200 come back.
It adds up: 800 sold in eu and 200 in us are 1000 of 1000; 0 differences in the ledgers.
`, exampletest.Build(t).Output())
}
