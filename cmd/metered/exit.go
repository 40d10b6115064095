package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/notary"
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

// need is the grant that a command needs.
type need string

const (
	needNothing     need = ""
	needReporting   need = "reporting"
	needApplication need = "application"
	needMaintenance need = "maintenance"
	needOwner       need = "owner"
)

// finish prints a command's error, and returns the exit code.
func (a *app) finish(ctx context.Context, c *cobra.Command, err error) int {
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
		name := metered.Code(err)
		if errors.Is(err, inspect.ErrUnknown) {
			name = "not_found"
		}
		_ = out.Encode(map[string]any{"error": text, "code": name, "exit": code})
		return code
	}
	fmt.Fprintf(a.err, "metered: %s\n", text)
	if code == exitUsage && !a.started {
		fmt.Fprintf(a.err, "Usage: %s\nSee %s --help.\n", c.UseLine(), c.CommandPath())
	}
	return code
}

func (a *app) exit(ctx context.Context, err error) int {
	var usage *usageError
	var config *pgconn.ParseConfigError
	switch {
	case ctx.Err() != nil:
		return exitInterrupted
	case !a.started, errors.As(err, &usage), errors.As(err, &config),
		metered.Code(err) == metered.Code(budget.ErrArgument):
		return exitUsage
	case errors.Is(err, errRefused):
		return exitRefused
	case errors.Is(err, holds.ErrUnknown), errors.Is(err, holds.ErrRetired),
		errors.Is(err, inspect.ErrUnknown), errors.Is(err, jobs.ErrNotParked),
		errors.Is(err, notary.ErrUnknown):
		return exitUnknown
	case notGranted(err):
		return exitNotGranted
	case errors.Is(err, budget.ErrNotMigrated), errors.Is(err, metered.ErrSchemaVersion),
		errors.Is(err, metered.ErrSchemaDiffers):
		return exitSchema
	}
	return exitFailed
}

func notGranted(err error) bool {
	var pg *pgconn.PgError
	return errors.Is(err, budget.ErrNotGranted) || errors.As(err, &pg) && pg.Code == "42501"
}

// advice is the text of an error, with a remedy.
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
	}
	text := err.Error()
	var gap *budget.FeedGapError
	if errors.As(err, &gap) && a.needs == needReporting {
		text += "; go on with --after " + string(gap.Start)
	} else if errors.As(err, &gap) {
		text += "; drop the consumer, and it begins there anew"
	}
	if missing := budget.ErrNotMigrated.Error(); strings.Contains(text, missing) { // it speaks to programs
		text = strings.ReplaceAll(text, missing, "something is missing in schema "+a.schema) +
			"; see metered migrate validate"
	}
	return packageNames.ReplaceAllString(text, "$1")
}

// packageNames begin the errors of the library, which a user of the command line does not know.
var packageNames = regexp.MustCompile(`(^|: )(?:inspect: not found|metered|budget|tokens|jobs|holds|wallet|leases|maintain|console|inspect|privacy|notary): `)

// schemaError is of a schema that this build cannot work with.
type schemaError struct {
	kind error
	text string
}

func (e *schemaError) Error() string { return e.text }
func (e *schemaError) Unwrap() error { return e.kind }
