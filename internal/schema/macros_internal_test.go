package schema

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A new entry copies each column that a macro does not name, and a value may have commas of its own.
func TestExpand_WritesEveryColumnOfAnEntry(t *testing.T) {
	t.Parallel()
	require.Equal(t, "values (tip.seq + 1, least(a, b), tip.at, tip.spent, tip.refunded, tip.credited, tip.held, tip.epoch, 'c', tip.scope, tip.next_due, tip.hold, "+
		"tip.operation_tenant, tip.operation, tip.note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, "+
		"int8smaller(tip.others, tip.seq))",
		expand("values ({entry of tip: seq = tip.seq + 1, amount = least(a, b),\n    kind = 'c'})"))
	require.Panics(t, func() { expand("{entry of tip: sequence = 1}") })
	require.NotContains(t, Current().definitions(), "{entry")
	require.NotContains(t, Current().definitions(), "{base")
}
