package budget_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

func requireJSON[T any](t *testing.T, want string, v T) {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	require.JSONEq(t, want, string(text))
	var back T
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, v, back)
}

func TestRefusal_AsJSONSaysNeverAndHowLong(t *testing.T) {
	t.Parallel()
	r := budget.Refusal{
		Scope: "a", Limit: budget.PerWindow(9, time.Minute).Named("burst"), Used: 5, Held: 2, Requested: 3, Available: 2,
		RetryAfter: 1500 * time.Millisecond, HoldDue: 7 * time.Microsecond,
	}
	const text = `{"scope":"a","limit":{"name":"burst","max":9,"window_us":60000000},"used":5,"held":2,"requested":3,"available":2,` +
		`"retry_after_us":1500000,"hold_due_us":7}`
	requireJSON(t, text, r)
	requireJSON(t, `{"refusals":[`+text+`]}`, budget.ExceededError{Refusals: []budget.Refusal{r}})
	requireJSON(t, `{"scope":"a","limit":{"max":0,"lifetime":true,"of_credit":true},"used":-4,"held":0,"requested":5,"available":4,"retry_after_us":null}`,
		budget.Refusal{Scope: "a", Limit: budget.Prepaid(), Used: -4, Requested: 5, Available: 4, RetryAfter: budget.Never})
	requireJSON(t, `{"scope":"","limit":{"max":1,"lifetime":true},"used":0,"held":1,"requested":1,"available":0,"retry_after_us":0,"hold_due_us":0}`,
		budget.Refusal{Limit: budget.Lifetime(1), Held: 1, Requested: 1}) // a hold that is due now
}

func TestUsage_AsJSONSaysItsWindow(t *testing.T) {
	t.Parallel()
	u := budget.Usage{
		Query: budget.Query{Scope: "a", Window: time.Hour}, Used: 1, Held: 2, HoldDue: time.Second, Spent: 3, Refunded: 4, Credited: 5, Seq: 6,
	}
	const sums = `"spent":3,"refunded":4,"credited":5,"seq":6`
	requireJSON(t, `{"scope":"a","window_us":3600000000,"used":1,"held":2,"hold_due_us":1000000,`+sums+`}`, u)
	u.Window, u.Held, u.HoldDue = budget.Forever, 0, 0
	requireJSON(t, `{"scope":"a","lifetime":true,"used":1,"held":0,`+sums+`}`, u)
	u.Window = 0
	text, err := json.Marshal(u)
	require.NoError(t, err)
	require.JSONEq(t, `{"scope":"a","lifetime":true,"used":1,"held":0,`+sums+`}`, string(text))
}

func TestClockRepair_AsJSONSaysHowFar(t *testing.T) {
	t.Parallel()
	requireJSON(t, `{"repaired":true,"seq":3,"at":"2026-01-01T00:00:00Z","ahead_us":90000000}`,
		budget.ClockRepair{Repaired: true, Seq: 3, At: start, Ahead: 90 * time.Second})
}
