package metered_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

func TestNew_RefusesWrongConfigAndReturnsNoClient(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]metered.Config{
		"Config.Schema":         {Config: budget.Config{Schema: "A"}},
		"Config.LockTimeout":    {Config: budget.Config{LockTimeout: time.Hour + 1}},
		"Config.ClockTolerance": {Config: budget.Config{ClockTolerance: -1}},
		"Config.MaxFuture":      {Config: budget.Config{MaxFuture: 25 * time.Hour}},
		"Config.MaxAttempts":    {MaxAttempts: 101},
		"Config.ResolveTimeout": {ResolveTimeout: -1},
		"Config.SecretKey":      {SecretKey: make([]byte, 32)},
		"Config.Prefix":         {TokenPrefix: "-"},
	} {
		c, err := metered.New(pgtest.Nowhere(t), cfg)
		require.ErrorIs(t, err, budget.ErrArgument, field)
		require.ErrorContains(t, err, field)
		require.Nil(t, c)
	}
	c, err := metered.New(nil, metered.Config{})
	require.ErrorIs(t, err, budget.ErrArgument)
	require.Nil(t, c)
	_, err = metered.New(pgtest.Nowhere(t), metered.Config{Config: budget.Config{LockTimeout: time.Hour}})
	require.NoError(t, err)
}

func TestRedeem_PrintsWithoutItsToken(t *testing.T) {
	t.Parallel()
	cmd := metered.Command{Token: &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: "metered_secret"}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+verb, cmd.Token, *cmd.Token)
	}
	for _, handler := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(handler).Info("x", "token", *cmd.Token, "pointer", cmd.Token, "command", cmd)
	}
	cmd.Statements = &pgx.Batch{}
	cmd.Statements.Queue("insert into keys values ($1)", "secret").Exec(func(pgconn.CommandTag) error { return nil })
	require.NoError(t, json.NewEncoder(&out).Encode(cmd))
	require.NotContains(t, out.String(), "secret")
	require.NotContains(t, out.String(), fmt.Sprintf("%x", "secret"))
	require.Contains(t, out.String(), "ann")
}

type foreign struct{}

func (foreign) Error() string { return "foreign" }

func (foreign) Code() string { return "foreign" }

func TestCode_IsOfThisLibrarysErrorsOnly(t *testing.T) {
	t.Parallel()
	require.Empty(t, metered.Code(nil))
	require.Empty(t, metered.Code(foreign{}))
	require.Equal(t, "busy", metered.Code(errors.Join(foreign{}, fmt.Errorf("while: %w", budget.ErrBusy))))
}

func TestNewID_IsAUUIDOfVersion7ThatDoCarriesTheTimeOf(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	before := time.Now().Truncate(time.Millisecond)
	id := metered.NewID()
	var uuid pgtype.UUID
	require.NoError(t, uuid.Scan(id))
	require.Equal(t, byte(7), uuid.Bytes[6]>>4)
	require.Equal(t, byte(0b10), uuid.Bytes[8]>>6)
	require.NotEqual(t, id, metered.NewID())

	_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id}, nil)
	require.NoError(t, err)
	op, err := c.Lookup(t.Context(), pool, "", id)
	require.NoError(t, err)
	require.False(t, op.IssuedAt.Before(before))
	require.False(t, op.IssuedAt.After(time.Now()))
}

func TestDo_WrongArgumentsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	c, err := metered.New(pgtest.Nowhere(t), metered.Config{})
	require.NoError(t, err)
	long := strings.Repeat("x", 256)
	good := pgtest.UnknownToken(t, c)
	many := make([]budget.Charge, bounds.MaxScopes+1)
	for i := range many {
		many[i] = pgtest.Charge(strings.Repeat("s", i+1), 1, 0)
	}
	for _, test := range []struct {
		cmd   metered.Command
		field string // "" is for errors of the pieces
		err   error
	}{
		{metered.Command{}, "Command.ID", budget.ErrArgument},
		{metered.Command{ID: long}, "Command.ID", budget.ErrArgument},
		{metered.Command{ID: "a\xff"}, "Command.ID", budget.ErrArgument},
		{metered.Command{ID: "a\x00"}, "Command.ID", budget.ErrArgument},
		{metered.Command{ID: "a", Tenant: long}, "Command.Tenant", budget.ErrArgument},
		{metered.Command{ID: "a", Tenant: "\x00"}, "Command.Tenant", budget.ErrArgument},
		{metered.Command{ID: "a", Name: long}, "Command.Name", budget.ErrArgument},
		{metered.Command{ID: "a", Name: "\xc3"}, "Command.Name", budget.ErrArgument},
		{metered.Command{ID: "a", Input: make(chan int)}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", Input: math.Inf(1)}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", Input: "a\xff"}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", Input: map[string]any{"\xff": 1}}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", Input: []any{json.RawMessage("\"\xff\"")}}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", Input: make([]byte, 1<<20+1)}, "Command.Input", budget.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", budget.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", budget.ErrArgument},
		{metered.Command{ID: "ffffffff-ffff-7fff-bfff-ffffffffffff"}, "Command.IssuedAt", budget.ErrArgument},
		{metered.Command{ID: "a", Isolation: "snapshot"}, "Command.Isolation", budget.ErrArgument},
		{metered.Command{ID: "a", Isolation: "read uncommitted"}, "Command.Isolation", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("", 1, 0)}}, "charges[0].Scope", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("s", 1, 0), pgtest.Charge("s", 0, 0)}}, "charges[1].Amount", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: many}, "charges", budget.ErrArgument},
		{metered.Command{ID: "a", Sticky: []budget.Charge{{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.Lifetime(-1)}}}}, "charges[0].Limits[0].Max", budget.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: good + "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Subject: "s", Presented: good}}, "purpose", budget.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Presented: good}}, "subject", budget.ErrArgument},
	} {
		_, err := metered.Do(t.Context(), c, test.cmd, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, test.err, "%+v", test.cmd)
		require.NotEmpty(t, metered.Code(err))
		if test.field != "" {
			var argument *budget.ArgumentError
			require.True(t, errors.As(err, &argument), "%v", err)
			require.Equal(t, test.field, argument.Field)
			require.ErrorContains(t, err, test.field)
		}
	}
}

func TestDo_TakesArgumentsJustWithinBounds(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{})
	longest := strings.Repeat("é", 127) + "x"
	first, last := time.Date(1, 1, 1, 0, 0, 0, 1000, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
	for _, test := range []struct {
		cmd metered.Command
		err error
	}{
		{metered.Command{ID: longest, Tenant: longest, Name: longest, Input: make([]byte, 1<<20)}, nil},
		{metered.Command{ID: "a", IssuedAt: first}, nil},
		{metered.Command{ID: "b", IssuedAt: last}, budget.ErrFuture},
		{metered.Command{ID: metered.NewID(), IssuedAt: last}, nil}, // the time in the id counts
	} {
		_, err := metered.Do[any](t.Context(), c, test.cmd, nil)
		require.ErrorIs(t, err, test.err)
	}
}

func TestLookup_AWrongIDIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	for _, id := range [][2]string{{"", ""}, {"\x00", "a"}, {"", "\xff"}, {"", strings.Repeat("x", 256)}} {
		_, err := c.Lookup(t.Context(), pool, id[0], id[1])
		require.ErrorIs(t, err, budget.ErrArgument, "%q", id)
	}
}

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	tx, cmd := struct{ pgx.Tx }{}, metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("s", 1, 0)}}
	fn := pgtest.MustNotRun(t)
	niltest.Methods(t, c, map[string][]any{
		"Lookup": {pool, "", "a"},
		"Secret": {"", "a", ""}, "RunTx": {pgx.TxOptions{}, func(context.Context, pgx.Tx) error { return nil }},
		"Listen": {pool, holds.ListenOptions{}, func(context.Context, metered.CommandNotice) error { return nil }},
	})
	niltest.Func(t, "NoOtherConnections", metered.NoOtherConnections, pool.Config())
	niltest.Func(t, "New", metered.New, pool, metered.Config{})
	niltest.Func(t, "Migrate", metered.Migrate, pool, metered.MigrateOptions{})
	niltest.Func(t, "Validate", metered.Validate, pool, "")
	niltest.Func(t, "DoTx", metered.DoTx[pgtest.Uploaded], niltest.Given{Arg: c}, tx, cmd, niltest.Given{Arg: fn})
	niltest.Func(t, "OpenTx", metered.OpenTx[any], niltest.Given{Arg: c}, tx, metered.Reservation{ID: "a"})

	for what, c := range map[string]*metered.Client{"nil": nil, "zero": {}} {
		_, err := metered.Do(t.Context(), c, cmd, fn)
		pgtest.RequireField(t, err, "client", what)
		_, err = metered.DoTx(t.Context(), c, tx, cmd, fn)
		pgtest.RequireField(t, err, "client", what)
		_, err = metered.OpenTx[any](t.Context(), c, tx, metered.Reservation{ID: "a"})
		pgtest.RequireField(t, err, "client", what)
	}
}

// Open returns no session with an error. A program that looks at the error too late is told so, and
// may have deferred Close.
func TestSession_NilIsRefused(t *testing.T) {
	t.Parallel()
	for what, s := range map[string]*metered.Session[any]{"nil": nil, "zero": {}} {
		defer s.Close()
		_, err := s.Settle(t.Context(), metered.Cost{All: true}, nil)
		pgtest.RequireField(t, err, "session", what)
		_, err = s.SettleTx(t.Context(), struct{ pgx.Tx }{}, metered.Cost{All: true}, nil)
		pgtest.RequireField(t, err, "session", what)
		pgtest.RequireField(t, s.Cancel(t.Context(), ""), "session", what)
		require.ErrorIs(t, context.Cause(s.Context()), budget.ErrArgument, what)
		require.Zero(t, s.Hold(), what)
		require.Zero(t, s.Outcome(), what)
		require.False(t, s.Finished(), what)
	}
}

// A caller can send on the values that the library returns: each field has a name, of one spelling, and no duration
// is a bare number of nanoseconds.
func TestJSON_ReturnedValuesHaveNamesAndUnits(t *testing.T) {
	t.Parallel()
	seen := map[reflect.Type]bool{}
	for _, v := range []any{
		metered.Outcome[int]{}, metered.Operation{}, jobs.HoldRef{}, jobs.CleanupArgs{},
		budget.Receipt{}, budget.Usage{}, budget.Entry{}, budget.ExceededError{}, budget.VerifyReport{}, budget.PurgeReport{}, budget.ClockState{},
		holds.Hold{}, holds.Page{}, holds.HistoryEvent{}, holds.Transition{}, holds.Notice{}, holds.SweepReport{},
		tokens.Grant{}, tokens.Minted{}, jobs.Result{}, jobs.Enqueued{}, httpmetered.Problem{},
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
