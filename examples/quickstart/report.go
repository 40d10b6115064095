package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/tokens"
)

// report prints the story and counts the checks.
type report struct {
	out            io.Writer
	checks, failed int
}

func (r *report) title(text string) { fmt.Fprintf(r.out, "\n%s\n", text) }

func (r *report) line(format string, args ...any) { fmt.Fprintf(r.out, "  "+format+"\n", args...) }

// check compares a value with the expected one. The story goes on if they differ, but the program exits with 1.
func check[T comparable](r *report, what string, got, want T) {
	r.checks++
	if got != want {
		r.failed++
		r.line("FAILED  %s: got %v, want %v", what, got, want)
		return
	}
	r.line("ok      %s: %+v", what, got)
}

func (r *report) summary() error {
	r.title("Result")
	if r.failed > 0 {
		return fmt.Errorf("%d of %d checks FAILED", r.failed, r.checks)
	}
	r.line("all %d checks held", r.checks)
	return nil
}

// failure ends the story: a step panics with it, and stopped makes an error of it.
type failure struct{ error }

// must returns the value of a call that has to succeed, or the story ends.
func must[T any](value T, err error) T {
	ok(err)
	return value
}

func ok(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// stopped is deferred around the story.
func stopped(err *error) {
	switch reason := recover().(type) {
	case nil:
	case failure:
		*err = reason.error
	default:
		panic(reason)
	}
}

// counts is how many rows the database has of all that a command writes.
type counts struct{ Entries, Operations, Spent, Rows, Jobs int }

const countsSQL = `
select (select count(*) from metered.ledger), (select count(*) from metered.operations),
    (select count(*) from metered.tokens where used > 0),
    (select count(*) from uploads), (select count(*) from river_job)`

func count(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}) (c counts, err error) {
	err = db.QueryRow(ctx, countsSQL).Scan(&c.Entries, &c.Operations, &c.Spent, &c.Rows, &c.Jobs)
	return c, err
}

func (s *story) unchanged(ctx context.Context, before counts) {
	check(s.report, "in the database as before", must(count(ctx, s.db.Pool)), before)
}

func (s *story) inspect(ctx context.Context, request upload) (tokens.Grant, error) {
	return s.app.metered.Tokens.Inspect(ctx, s.db.Pool, purpose, request.Account, request.Token)
}

// unspent checks that a token can still be used.
func (s *story) unspent(ctx context.Context, request upload) {
	info, err := s.inspect(ctx, request)
	if !errors.Is(err, tokens.ErrInvalid) {
		ok(err)
	}
	check(s.report, "uses left of its token", info.UsesLeft, 1)
}
