package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/tokens"
)

func (s *story) repeats(ctx context.Context) {
	s.title("The same again")
	before := must(count(ctx, s.db.Pool))
	again := must(s.client.upload(ctx, s.first.request))
	check(s.report, "same operation, status", again.status, http.StatusOK)
	check(s.report, "its answer is the first one", strings.TrimSpace(again.body), strings.TrimSpace(s.first.answer.body))
	changed, other := s.first.request, s.first.request
	changed.file.Content = []byte("something else\n")
	other.operation = metered.NewID()
	for _, try := range []struct {
		what    string
		request sent
		want    int
	}{
		{"same operation with another file, status", changed, http.StatusUnprocessableEntity},
		{"same token for another operation, status", other, http.StatusForbidden},
	} {
		a := must(s.client.upload(ctx, try.request))
		check(s.report, try.what, a.status, try.want)
		s.line("        %s", strings.TrimSpace(a.body))
	}
	var invalid *tokens.InvalidError
	_, err := s.inspect(ctx, s.first.request)
	if !errors.As(err, &invalid) {
		ok(fmt.Errorf("inspecting a used token: %w", err))
	}
	check(s.report, "the reason, for the server alone", invalid.Reason(), "used")
	s.unchanged(ctx, before)
}

func (s *story) overBudget(ctx context.Context) {
	s.title("Over budget")
	scope := scopeOf(account)
	usage := must(s.app.metered.Budget.Usage(ctx, s.db.Pool,
		budget.Query{Scope: scope, Window: time.Hour}, budget.Query{Scope: scope, Window: 24 * time.Hour}))
	left := s.app.plans[account].Hourly - usage[0].Used
	s.line("used %d bytes in an hour, %d in a day", usage[0].Used, usage[1].Used)
	s.line("%d are left of the hour's, and the next upload has one more", left)
	request := s.prepare(ctx, file{"too-large.bin", make([]byte, left+1)})
	before := must(count(ctx, s.db.Pool))
	a := must(s.client.upload(ctx, request))
	check(s.report, "status", a.status, http.StatusTooManyRequests)
	if a.status != http.StatusTooManyRequests {
		return
	}
	s.line("        %s", strings.TrimSpace(a.body))
	s.retryTime(ctx, scope, a)
	s.unspent(ctx, request)
	s.unchanged(ctx, before)
}

// retryTime checks that the answer names the time when the oldest upload leaves the hour, which makes room enough.
func (s *story) retryTime(ctx context.Context, scope string, a answer) {
	check(s.report, "Retry-After in seconds", a.retryAfter, fmt.Sprint(a.problem.RetryAfterSeconds))
	retry := time.Duration(a.problem.RetryAfterSeconds) * time.Second
	var now time.Time
	ok(s.db.Pool.QueryRow(ctx, `select clock_timestamp()`).Scan(&now))
	for oldest, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{Max: 1}) {
		ok(err)
		late := now.Add(retry).Sub(oldest.At.Add(time.Hour)) // by as much as the answer is old, and less than a second
		check(s.report, "it is when the oldest upload is an hour old", late >= 0 && late < 11*time.Second, true)
	}
}
