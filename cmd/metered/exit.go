package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
)

// The exit codes, as metered help exit-codes has them.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitDifferences = 3
	exitRefused     = 4
	exitUnknown     = 5
	exitNotGranted  = 6
	exitSchema      = 7
	exitInterrupted = 130
)

// found is the end of a command that has said all there is to say.
type found int

func (f found) Error() string { return fmt.Sprintf("exit code %d", int(f)) }

// usageError is of an argument that is not understood.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// errRefused is of a question that was not answered with yes.
var errRefused = errors.New("not confirmed: nothing was done")

// need is what a role must have been given for a command.
type need string

const (
	needNothing     need = ""
	needReporting   need = "reporting"
	needApplication need = "application"
	needMaintenance need = "maintenance"
	needOwner       need = "owner"
)

// finish tells what went wrong, and returns the exit code.
func (a *app) finish(ctx context.Context, err error) int {
	var done found
	if err == nil || errors.As(err, &done) {
		return int(done)
	}
	code, text := a.exit(ctx, err), a.advice(err)
	if ctx.Err() != nil {
		text = "interrupted"
	}
	if a.json {
		out := json.NewEncoder(a.err)
		out.SetEscapeHTML(false)
		_ = out.Encode(map[string]any{"error": text, "code": metered.Code(err), "exit": code})
		return code
	}
	fmt.Fprintf(a.err, "metered: %s\n", text)
	if code == exitUsage && !a.started {
		fmt.Fprintln(a.err, "See metered help.")
	}
	return code
}

func (a *app) exit(ctx context.Context, err error) int {
	var usage *usageError
	var config *pgconn.ParseConfigError
	switch {
	case ctx.Err() != nil:
		return exitInterrupted
	case !a.started, errors.As(err, &usage), errors.As(err, &config), metered.Code(err) == metered.Code(metered.ErrArgument):
		return exitUsage
	case errors.Is(err, errRefused):
		return exitRefused
	case errors.Is(err, holds.ErrUnknown), errors.Is(err, holds.ErrRetired), errors.Is(err, inspect.ErrUnknown):
		return exitUnknown
	case notGranted(err):
		return exitNotGranted
	case errors.Is(err, metered.ErrNotMigrated), errors.Is(err, metered.ErrSchemaVersion), errors.Is(err, metered.ErrSchemaDiffers):
		return exitSchema
	}
	return exitFailed
}

func notGranted(err error) bool {
	var pg *pgconn.PgError
	return errors.Is(err, metered.ErrNotGranted) || errors.As(err, &pg) && pg.Code == "42501"
}

// advice is the text of an error, and what to do about it.
func (a *app) advice(err error) string {
	role := a.user
	if role == "" {
		role = "ROLE"
	}
	switch {
	case notGranted(err) && a.needs == needOwner:
		return fmt.Sprintf("role %s may not do this: connect as the owner of schema %s, or as a member of it (%v)", role, a.schema, err)
	case notGranted(err):
		return fmt.Sprintf("role %s lacks the %s grants; the schema's owner gives them with: metered grant %[2]s %s --apply (%v)",
			role, a.needs, shellWord(role), err)
	case errors.Is(err, metered.ErrNotMigrated) && a.started:
		return fmt.Sprintf("%v; see metered migrate status, and bring it up with: metered migrate up", err)
	}
	return err.Error()
}
