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

func (s *story) repeats(ctx context.Context) error {
	s.title("The same again")
	before, err := count(ctx, s.db.Pool)
	if err != nil {
		return err
	}
	again, err := s.client.upload(ctx, s.first.request)
	if err != nil {
		return err
	}
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
		a, err := s.client.upload(ctx, try.request)
		if err != nil {
			return err
		}
		check(s.report, try.what, a.status, try.want)
		s.line("        %s", strings.TrimSpace(a.body))
	}
	var invalid *tokens.InvalidError
	_, err = s.inspect(ctx, s.first.request)
	if !errors.As(err, &invalid) {
		return fmt.Errorf("inspecting a used token: %w", err)
	}
	check(s.report, "the reason, for the server alone", invalid.Reason(), tokens.ReasonUsed)
	return s.unchanged(ctx, before)
}

func (s *story) overBudget(ctx context.Context) error {
	s.title("Over budget")
	scope := scopeOf(account)
	usage, err := s.app.metered.Budget.Usage(ctx, s.db.Pool,
		budget.Query{Scope: scope, Window: time.Hour}, budget.Query{Scope: scope, Window: 24 * time.Hour})
	if err != nil {
		return err
	}
	left := s.app.plans[account].Hourly - usage[0].Used
	s.line("used %d bytes in an hour, %d in a day", usage[0].Used, usage[1].Used)
	s.line("%d are left of the hour's, and the next upload has one more", left)
	request, err := s.prepare(ctx, file{"too-large.bin", make([]byte, left+1)})
	if err != nil {
		return err
	}
	before, err := count(ctx, s.db.Pool)
	if err != nil {
		return err
	}
	a, err := s.client.upload(ctx, request)
	if err != nil {
		return err
	}
	check(s.report, "status", a.status, http.StatusTooManyRequests)
	if a.status != http.StatusTooManyRequests {
		return nil
	}
	s.line("        %s", strings.TrimSpace(a.body))
	if err := s.retryTime(ctx, scope, a); err != nil {
		return err
	}
	if err := s.unspent(ctx, request); err != nil {
		return err
	}
	return s.unchanged(ctx, before)
}

// retryTime checks that the answer names the time when the oldest upload leaves the hour, which makes room enough.
func (s *story) retryTime(ctx context.Context, scope string, a answer) error {
	check(s.report, "Retry-After in seconds", a.retryAfter, fmt.Sprint(a.problem.RetryAfterSeconds))
	retry := time.Duration(a.problem.RetryAfterSeconds) * time.Second
	var now time.Time
	if err := s.db.Pool.QueryRow(ctx, `select clock_timestamp()`).Scan(&now); err != nil {
		return err
	}
	for oldest, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{Max: 1}) {
		if err != nil {
			return err
		}
		late := now.Add(retry).Sub(oldest.At.Add(time.Hour)) // by as much as the answer is old, and less than a second
		check(s.report, "it is when the oldest upload is an hour old", late >= 0 && late < 11*time.Second, true)
	}
	return nil
}
