package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/niltest"
)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	tx, pool := untouchable{t: t}, new(pgxpool.Pool)
	charge := budget.Charge{Scope: "s", Amount: 1}
	credit, refund := budget.Credit{Scope: "s", Amount: 1}, budget.Refund{Scope: "s", Seq: 1, Amount: 1}
	niltest.Methods(t, ledger, map[string][]any{
		"Charge": {tx, charge}, "Check": {tx, charge}, "Credit": {tx, credit}, "Refund": {tx, refund}, "Lock": {tx, "s"},
		"Entries": {tx, "s", budget.EntriesOptions{}}, "Usage": {tx, budget.Query{Scope: "s"}}, "RepairClock": {tx, "s", budget.Note{}},
		"Purge": {pool, budget.PurgeOptions{OlderThan: time.Hour}}, "Verify": {pool, budget.VerifyOptions{}},
		"LockKey": {"s"}, "Create": {tx, "s"}, "Retire": {tx, "s"}, "Restore": {tx, "s"}, "Resources": {pool, budget.ResourceFilter{}},
	})
}
