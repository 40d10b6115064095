package metered_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
	"github.com/pgmetered/metered/httplimit"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// What the library returns can be sent on as it is: each field has a name, of one spelling, and no
// duration is a bare number of nanoseconds.
func TestJSON_WhatIsReturnedHasNamesAndUnits(t *testing.T) {
	t.Parallel()
	seen := map[reflect.Type]bool{}
	for _, v := range []any{
		metered.Outcome[int]{}, metered.Operation{}, holdjobs.Ref{}, holdjobs.CleanupArgs{},
		budget.Receipt{}, budget.Usage{}, budget.Entry{}, budget.ExceededError{}, budget.VerifyReport{}, budget.PurgeReport{}, budget.ClockRepair{},
		holds.Hold{}, holds.Listed{}, holds.DueList{}, holds.Event{}, holds.Transition{}, holds.Notice{}, holds.SweepReport{},
		tokens.Info{}, tokens.Grant{}, tokens.Minted{}, jobs.Result{}, jobs.Record{}, httplimit.Problem{},
	} {
		requireNames(t, reflect.TypeOf(v), seen)
	}
	require.Contains(t, seen, reflect.TypeFor[budget.Note]())
	require.Contains(t, seen, reflect.TypeFor[budget.Difference]())
}

func requireNames(t *testing.T, of reflect.Type, seen map[reflect.Type]bool) {
	t.Helper()
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || !strings.HasPrefix(of.PkgPath(), "github.com/pgmetered/") || seen[of] {
		return
	}
	seen[of] = true
	marshals := of.Implements(reflect.TypeFor[json.Marshaler]())
	for i := range of.NumField() {
		field := of.Field(i)
		if !field.IsExported() {
			continue
		}
		what := of.String() + "." + field.Name
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && name == "":
		case field.Type == reflect.TypeFor[time.Duration]():
			require.True(t, marshals && (name == "-" || of == reflect.TypeFor[budget.Limit]()), what)
		case marshals && name == "": // MarshalJSON names it
		default:
			require.Regexp(t, `^([a-z][a-z_-]*|-)$`, name, what)
		}
		if name != "-" {
			requireNames(t, field.Type, seen)
		}
	}
}
