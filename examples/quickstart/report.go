package main

import (
	"fmt"
	"io"
	"text/tabwriter"
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
	r.line("ok      %s: %v", what, got)
}

// table prints rows of cells, aligned.
func (r *report) table(rows ...[]any) {
	w := tabwriter.NewWriter(r.out, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			fmt.Fprintf(w, "%s%v", []string{"  ", "\t"}[min(i, 1)], cell)
		}
		fmt.Fprintln(w)
	}
	_ = w.Flush()
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
