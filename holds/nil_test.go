package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/niltest"
)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	tx, pool := untouchable{}, new(pgxpool.Pool)
	request := holds.Request{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}
	claim := holds.Claim{Key: holds.Key{Type: "seat", Value: "a"}, Holder: "ann", TTL: time.Minute}
	capture, release := holds.Capture{IDs: []string{"a"}, All: true}, holds.Release{IDs: []string{"a"}}
	extend, refund := holds.Extend{IDs: []string{"a"}, By: time.Minute}, holds.Refund{IDs: []string{"a"}, All: true}
	handle := func(context.Context, holds.Notice) error { return nil }
	niltest.Methods(t, book, map[string][]any{
		"Place": {tx, request}, "Claim": {tx, claim}, "Capture": {tx, capture}, "Release": {tx, release}, "Extend": {tx, extend}, "Refund": {tx, refund},
		"Expire": {tx, holds.Expire{ID: "a", Deadline: time.Unix(1, 0)}},
		"Get":    {tx, "", "a", ""}, "History": {tx, "", "a", ""}, "List": {tx, holds.Filter{}}, "Due": {tx, holds.DueFilter{}},
		"Claimed": {tx, "", claim.Key}, "ClaimedMany": {tx, "", claim.Key},
		"Sweep": {pool, holds.SweepOptions{}}, "Purge": {pool, holds.PurgeOptions{}}, "Listen": {pool, holds.ListenOptions{}, handle},
		"Channel": {},
	})
	niltest.Func(t, "New", holds.New, ledger, holds.Config{})
	_, err = holds.New(new(budget.Ledger), holds.Config{})
	requireArgument(t, err, "ledger")
}
