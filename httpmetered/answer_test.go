package httpmetered_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// answered is Write's answer to an error.
type answered struct {
	status     int
	retryAfter string
}

func refused(limits ...budget.Limit) error {
	e := &budget.ExceededError{}
	for _, limit := range limits {
		e.Refusals = append(e.Refusals, budget.Refusal{Scope: "secret", Limit: limit, Requested: 777, RetryAfter: 90 * time.Second})
	}
	return e
}

// A row for each code of docs/http.md. A code that is new has to be given one.
func TestWrite_AnswersEveryCode(t *testing.T) {
	t.Parallel()
	table := map[string]struct {
		err  error
		want answered
	}{
		"budget_exceeded":    {refused(budget.PerWindow(9, time.Hour)), answered{429, "90"}},
		"token_invalid":      {tokens.ErrInvalid, answered{403, ""}},
		"operation_conflict": {budget.ErrConflict, answered{422, ""}},
		"operation_retired":  {budget.ErrRetired, answered{409, ""}},
		"operation_stale":    {metered.ErrStale, answered{409, ""}},
		"operation_future":   {budget.ErrFuture, answered{400, ""}},

		"busy":           {budget.ErrBusy, answered{503, "1"}},
		"timeout":        {fmt.Errorf("%w: %w", metered.ErrTimeout, context.DeadlineExceeded), answered{503, "1"}},
		"serialization":  {budget.ErrSerialization, answered{503, "1"}},
		"commit_unknown": {budget.ErrCommitUnknown, answered{500, ""}},
		"limit_query":    {fault.New("limit_query", ""), answered{500, ""}},
		"indefinite":     {metered.ErrIndefinite, answered{503, "1"}},

		"event_late":     {budget.ErrLate, answered{400, ""}},
		"batcher_closed": {budget.ErrClosed, answered{503, ""}},

		"invalid_argument": {budget.ErrArgument, answered{400, ""}},

		"not_migrated":   {budget.ErrNotMigrated, answered{500, ""}},
		"not_granted":    {budget.ErrNotGranted, answered{500, ""}},
		"schema_version": {metered.ErrSchemaVersion, answered{500, ""}},
		"schema_differs": {metered.ErrSchemaDiffers, answered{500, ""}},
		"no_river":       {fault.New("no_river", ""), answered{500, ""}},
		"job_plugin":     {fault.New("job_plugin", ""), answered{500, ""}},

		"transaction_control": {guardtx.ErrControl, answered{500, ""}},
		"transaction_done":    {guardtx.ErrDone, answered{500, ""}},
		"transaction_failed":  {guardtx.ErrFailed, answered{500, ""}},
		"nested_command":      {command.ErrNested, answered{500, ""}},
		"invalid_result":      {fault.New("invalid_result", ""), answered{500, ""}},

		"budget_clock":          {budget.ErrClock, answered{500, ""}},
		"budget_time_zone":      {fault.New("budget_time_zone", ""), answered{500, ""}},
		"budget_thresholds":     {fault.New("budget_thresholds", ""), answered{500, ""}},
		"feed_gap":              {budget.ErrFeedGap, answered{500, ""}},
		"budget_window_purged":  {budget.ErrWindowPurged, answered{500, ""}},
		"budget_overflow":       {fault.New("budget_overflow", ""), answered{500, ""}},
		"budget_unknown_entry":  {budget.ErrUnknownEntry, answered{404, ""}},
		"budget_entry_purged":   {budget.ErrEntryPurged, answered{409, ""}},
		"budget_not_charge":     {budget.ErrNotCharge, answered{409, ""}},
		"budget_refund_exceeds": {&budget.RefundExceedsError{Requested: 777, Remaining: 777}, answered{409, ""}},

		"wallet_conflict":    {wallet.ErrConflict, answered{409, ""}},
		"wallet_expired":     {wallet.ErrExpired, answered{409, ""}},
		"wallet_unknown_lot": {wallet.ErrUnknownLot, answered{404, ""}},

		"scope_unknown":      {&budget.ScopeError{Unknown: []string{"secret"}, Retired: []string{"secret"}}, answered{404, ""}},
		"scope_retired":      {&budget.ScopeError{Retired: []string{"secret"}}, answered{410, ""}},
		"scope_closed":       {&budget.ScopeError{Closed: []string{"secret"}}, answered{410, ""}},
		"leases_unavailable": {leases.ErrUnavailable, answered{503, ""}}, "leases_closed": {leases.ErrClosed, answered{503, ""}},
		"carve_unknown": {leases.ErrUnknownChild, answered{404, ""}}, "carve_conflict": {leases.ErrCarved, answered{409, ""}},
		"carve_child_used": {leases.ErrChildUsed, answered{409, ""}},

		"token_exists":      {tokens.ErrExists, answered{409, ""}},
		"job_conflict":      {fmt.Errorf("%w: secret", jobs.ErrConflict), answered{409, ""}},
		"job_key_not_found": {jobs.ErrNotFound, answered{404, ""}},
		"job_not_parked":    {jobs.ErrNotParked, answered{409, ""}},
		"jobs_full":         {fmt.Errorf("%w: 777 wait for \"secret\"", jobs.ErrFull), answered{429, ""}},

		"hold_unknown":        {holds.ErrUnknown, answered{404, ""}},
		"hold_retired":        {holds.ErrRetired, answered{409, ""}},
		"hold_conflict":       {holds.ErrConflict, answered{409, ""}},
		"claim_taken":         {&holds.TakenError{RetryAfter: 1100 * time.Millisecond}, answered{409, "2"}},
		"hold_state":          {holds.ErrState, answered{409, ""}},
		"hold_held":           {&holds.StateError{ID: "secret", State: holds.Held}, answered{409, ""}},
		"hold_captured":       {&holds.StateError{ID: "secret", State: holds.Captured}, answered{409, ""}},
		"hold_released":       {&holds.StateError{ID: "secret", State: holds.Released}, answered{409, ""}},
		"hold_expired":        {&holds.StateError{ID: "secret", State: holds.Expired}, answered{409, ""}},
		"hold_returned":       {&holds.StateError{State: holds.Returned, Hold: holds.Hold{State: holds.Returned, Holder: "secret"}}, answered{409, ""}},
		"hold_excess":         {&holds.ExcessError{Scope: "secret", Requested: 777}, answered{409, ""}},
		"hold_ceiling":        {fmt.Errorf("%w: secret has 777 left", holds.ErrCeiling), answered{409, ""}},
		"hold_not_returnable": {holds.ErrNotReturnable, answered{409, ""}},

		"session_running":     {&metered.RunningError{ID: "secret", RetryAfter: 6100 * time.Millisecond}, answered{409, "7"}},
		"session_finished":    {metered.ErrFinished, answered{409, ""}},
		"session_lost":        {fmt.Errorf("%w: secret", metered.ErrLost), answered{409, ""}},
		"session_not_renewed": {fmt.Errorf("%w: secret has 777 left", metered.ErrNotRenewed), answered{503, ""}},

		"idempotency_key_missing":   {fault.New("idempotency_key_missing", ""), answered{400, ""}},
		"idempotency_key_invalid":   {fault.New("idempotency_key_invalid", ""), answered{400, ""}},
		"idempotency_key_in_flight": {fault.New("idempotency_key_in_flight", ""), answered{409, "1"}},
		"answer_unrecordable":       {fault.New("answer_unrecordable", ""), answered{500, ""}},

		"answer_unreadable": {fault.ErrUnread, answered{500, ""}},
		"operation_unknown": {metered.ErrUnknownOperation, answered{404, ""}},
		"sticky_failed":     {metered.ErrSticky, answered{500, ""}},
		"stale_read":        {fmt.Errorf("%w: 777", replica.ErrStale), answered{503, "1"}},
		"position_unknown":  {replica.ErrAhead, answered{409, ""}},

		"read_only":    {fault.ErrReadOnly, answered{503, "1"}},
		"tenant_moved": {fault.ErrMoved, answered{503, "1"}},
		"cell_differs": {fault.ErrNotCell, answered{500, ""}},

		// These are of other modules.
		"alias_taken":     {fault.New("alias_taken", "privacy.ErrAliasTaken"), answered{409, ""}},
		"not_notarized":   {fault.New("not_notarized", "notary.ErrUnknown"), answered{404, ""}},
		"head_invalid":    {fault.New("head_invalid", "notary.ErrHead"), answered{400, ""}},
		"tenant_open":     {fmt.Errorf("%w: secret", fault.New("tenant_open", "cells.ErrOpen")), answered{500, ""}},
		"tenant_conflict": {fault.New("tenant_conflict", "cells.ErrConflict"), answered{500, ""}},
	}
	page, err := os.ReadFile("../docs/http.md")
	require.NoError(t, err)
	_, list, ok := strings.Cut(string(page), "\n| codes | status |")
	require.True(t, ok)
	list, _, _ = strings.Cut(list, "\n\n")
	documented := map[string]bool{"budget_exceeded": true} // is in a table of its own
	for _, row := range regexp.MustCompile("(?m)^\\| `([^|]*)` ").FindAllStringSubmatch(list, -1) {
		for _, code := range strings.Split(row[1], "` `") {
			code, _, _ = strings.Cut(code, "`")
			documented[code] = true
		}
	}
	for code := range documented {
		test, ok := table[code]
		if !ok {
			t.Errorf("%s has no answer", code)
			continue
		}
		require.Equal(t, code, metered.Code(test.err))
		requireAnswer(t, test.want, code, test.err)
	}
	require.Len(t, documented, len(table))
}

func requireAnswer(t *testing.T, want answered, code string, err error) {
	t.Helper()
	w := httptest.NewRecorder()
	w.Header().Set("Retry-After", "77")
	require.Equal(t, want.status, httpmetered.Write(w, fmt.Errorf("while working for secret: %w", err)), code)
	require.Equal(t, want, answered{w.Code, w.Header().Get("Retry-After")}, code)
	require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"))
	body := w.Body.String()
	require.NotContains(t, body, "secret")
	require.NotContains(t, body, "777")
	if want.status == 500 {
		require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, body, code)
		return
	}
	require.Contains(t, body, `"status":`+strconv.Itoa(want.status))
	if code != "" {
		require.Contains(t, body, `"code":"`+code+`"`)
	}
}

func TestWrite_AnswersARefusalByItsLimits(t *testing.T) {
	t.Parallel()
	window, stock, credit := budget.PerWindow(9, time.Hour), budget.Lifetime(9), budget.Prepaid(0)
	const code = "budget_exceeded"
	requireAnswer(t, answered{429, "90"}, code, refused(window, window))
	requireAnswer(t, answered{429, "90"}, code, refused(budget.PerWindow(0, time.Hour)))
	requireAnswer(t, answered{409, "90"}, code, refused(window, stock))
	month := budget.Per(9, budget.Month, time.UTC, time.Time{})
	requireAnswer(t, answered{429, "90"}, code, refused(month, window))
	requireAnswer(t, answered{409, "90"}, code, refused(month, stock))
	requireAnswer(t, answered{402, ""}, code, refused(month, credit))
	requireAnswer(t, answered{402, ""}, code, refused(window, credit))
	requireAnswer(t, answered{402, ""}, code, refused(stock, credit, window))
	for _, limit := range []budget.Limit{window, stock, credit} {
		requireAnswer(t, answered{429, "90"}, code, fmt.Errorf("%w: %w", metered.ErrTooManyAttempts, refused(limit)))
	}
	requireAnswer(t, answered{429, ""}, "", metered.ErrTooManyAttempts)
	requireAnswer(t, answered{429, ""}, code, budget.ErrExceeded)

	requireAnswer(t, answered{409, ""}, "claim_taken", &holds.TakenError{Confirmed: true})
	requireAnswer(t, answered{409, "1"}, "claim_taken", &holds.TakenError{}) // free at any moment
}

func TestWrite_AnswersErrorsWithoutACode(t *testing.T) {
	t.Parallel()
	postgres := func(state string) error { return &pgconn.PgError{Code: state, Message: "secret"} }
	requireAnswer(t, answered{503, "1"}, "", postgres("40001"))
	requireAnswer(t, answered{503, "1"}, "", pgconn.ErrConnClosed)
	requireAnswer(t, answered{503, "1"}, "sticky_failed", fmt.Errorf("%w: %w", metered.ErrSticky, postgres("57P01")))
	requireAnswer(t, answered{500, ""}, "", postgres("23505"))
	requireAnswer(t, answered{500, ""}, "", errors.New("the function's own"))
	requireAnswer(t, answered{499, ""}, "", context.Canceled)
	requireAnswer(t, answered{413, ""}, "", &http.MaxBytesError{Limit: 777})
	require.Equal(t, 500, httpmetered.Write(httptest.NewRecorder(), nil))

	_, misused := metered.New(nil, metered.Config{})
	requireAnswer(t, answered{500, ""}, "a nil", misused)
	_, misused = budget.New(budget.Config{LockTimeout: -1})
	requireAnswer(t, answered{500, ""}, "a Config", misused)
}

func TestWrite_NamesTheOperationOfAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	require.Equal(t, 503, httpmetered.Write(w, fmt.Errorf("order: %w", &metered.IndefiniteError{Tenant: "secret", ID: "op-1"})))
	require.JSONEq(t, `{"title":"Service Unavailable","status":503,"code":"indefinite","retry_after_seconds":1,"operation":"op-1"}`, w.Body.String())
}

func TestWrite_AnswersAProblemAsItIs(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		problem httpmetered.Problem
		want    string
	}{
		{httpmetered.Problem{Status: 404, Code: "no_seat", Detail: "no such seat"}, `{"title":"Not Found","status":404,"code":"no_seat","detail":"no such seat"}`},
		{httpmetered.Problem{Status: 409, Code: "claim_taken", RetryAfterSeconds: 7}, `{"title":"Conflict","status":409,"code":"claim_taken","retry_after_seconds":7}`},
		{httpmetered.Problem{Detail: "broken"}, `{"title":"Internal Server Error","status":500,"detail":"broken"}`},
		{httpmetered.Problem{Status: 409, Title: "Held", Extra: map[string]any{"until": 9, "a": []int{1}}}, `{"title":"Held","status":409,"until":9,"a":[1]}`},
	} {
		w := httptest.NewRecorder()
		status := httpmetered.Write(w, fmt.Errorf("while working: %w", &test.problem))
		require.Equal(t, status, w.Code)
		require.JSONEq(t, test.want, w.Body.String())
	}
	w := httptest.NewRecorder()
	require.Equal(t, 404, httpmetered.Write(w, &httpmetered.Problem{Status: 404, Extra: map[string]any{"a": func() {}}}))
	require.JSONEq(t, `{"title":"Not Found","status":404}`, w.Body.String())
}

// While credit is reserved the ledger knows when it may come back. A client must not poll for it all the same.
func TestWrite_WantOfCreditIs402WhileHoldsAreOpen(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Open(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	in := func(fn func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, fn) }
	place := func(scope string, limit budget.Limit) {
		require.NoError(t, in(func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{
				TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 5, Limits: []budget.Limit{limit}}},
			})
			return err
		}))
	}
	require.NoError(t, in(func(tx pgx.Tx) error {
		_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: "wallet", Amount: 5})
		return err
	}))
	place("wallet", budget.Prepaid(0))
	place("stock", budget.Lifetime(5))
	ask := func(cmd metered.Command) (answered, string) {
		t.Helper()
		cmd.ID = metered.NewID()
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.ErrorIs(t, err, budget.ErrExceeded)
		w := httptest.NewRecorder()
		httpmetered.Write(w, err)
		return answered{w.Code, w.Header().Get("Retry-After")}, w.Body.String()
	}
	charge := func(scope string, limit budget.Limit) []budget.Charge {
		return []budget.Charge{{Scope: scope, Amount: 5, Limits: []budget.Limit{limit}}}
	}

	got, body := ask(metered.Command{Charges: charge("wallet", budget.Prepaid(0))})
	require.Equal(t, answered{http.StatusPaymentRequired, ""}, got)
	require.JSONEq(t, `{"title":"Payment Required","status":402,"code":"budget_exceeded","detail":"a part of the credit is reserved"}`, body)
	got, body = ask(metered.Command{Charges: charge("nothing", budget.Prepaid(0))})
	require.Equal(t, answered{http.StatusPaymentRequired, ""}, got)
	require.JSONEq(t, `{"title":"Payment Required","status":402,"code":"budget_exceeded"}`, body)
	got, _ = ask(metered.Command{Charges: charge("stock", budget.Lifetime(5))})
	require.Equal(t, http.StatusConflict, got.status)
	require.NotEmpty(t, got.retryAfter, "the hold ends within a minute")
	got, _ = ask(metered.Command{Charges: charge("empty", budget.Lifetime(4))})
	require.Equal(t, answered{http.StatusConflict, ""}, got)
	got, _ = ask(metered.Command{Sticky: charge("wallet", budget.Prepaid(0))})
	require.Equal(t, http.StatusTooManyRequests, got.status)
}
