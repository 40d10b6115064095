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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/holds/holdjobs"
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
		"Config.Schema":         {Schema: "A"},
		"Config.LockTimeout":    {LockTimeout: time.Hour + 1},
		"Config.ClockTolerance": {ClockTolerance: -1},
		"Config.MaxFuture":      {MaxFuture: 25 * time.Hour},
		"Config.MaxAttempts":    {MaxAttempts: 101},
		"Config.ResolveTimeout": {ResolveTimeout: -1},
		"Config.SecretKey":      {SecretKey: make([]byte, 32)},
		"Config.Prefix":         {TokenPrefix: "-"},
	} {
		c, err := metered.New(pgtest.Nowhere(t), cfg)
		require.ErrorIs(t, err, metered.ErrArgument, field)
		require.ErrorContains(t, err, field)
		require.Nil(t, c)
	}
	c, err := metered.New(nil, metered.Config{})
	require.ErrorIs(t, err, metered.ErrArgument)
	require.Nil(t, c)
	_, err = metered.New(pgtest.Nowhere(t), metered.Config{LockTimeout: time.Hour})
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
	require.NoError(t, json.NewEncoder(&out).Encode(cmd))
	require.NotContains(t, out.String(), "secret")
	require.NotContains(t, out.String(), fmt.Sprintf("%x", "secret"))
	require.Contains(t, out.String(), "ann")
}

type foreign struct{}

func (foreign) Error() string { return "foreign" }
func (foreign) Code() string  { return "foreign" }

func TestCode_IsOfThisLibrarysErrorsOnly(t *testing.T) {
	t.Parallel()
	require.Empty(t, metered.Code(nil))
	require.Empty(t, metered.Code(foreign{}))
	require.Equal(t, "busy", metered.Code(errors.Join(foreign{}, fmt.Errorf("while: %w", metered.ErrBusy))))
}

func TestDo_WaitsForATokenNoLongerThanTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{LockTimeout: 100 * time.Millisecond})
	presented := pgtest.Mint(t, pool, c)
	holder, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = c.Tokens.Consume(t.Context(), holder, "upload", "ann", presented)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = metered.Do(ctx, c, metered.Command{ID: "op", Token: pgtest.Redeem(presented)}, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, metered.ErrBusy)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

func TestDo_AStatementTimeoutOfTheFunctionsOwnIsNotTheDeadline(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, `set local statement_timeout = '10ms'`)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `select pg_sleep(60)`)
		return nil, err
	}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op"}, fn)
	require.Error(t, err)
	require.NotErrorIs(t, err, metered.ErrTimeout)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
}

func TestPurgeOperations_WorksAtEachDefaultIsolation(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{Config: func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	}})
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	for i := range 40 {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: fmt.Sprint(i), Isolation: pgx.ReadCommitted}, nil)
		require.NoError(t, err)
	}
	clock.Advance(time.Hour)
	pgtest.AtOnce(8, func(int) {
		if _, err := c.PurgeOperations(t.Context(), pool, metered.PurgeOptions{OlderThan: time.Minute, Batch: 3}); err != nil {
			t.Error(err)
		}
	})
	require.Zero(t, pgtest.Count(t, pool, "metered.operations"))
}

func TestDo_InsideACommandIsNested(t *testing.T) {
	t.Parallel()
	var c *metered.Client
	nested := func(ctx context.Context) {
		for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
			_, err := metered.Do(ctx, c, metered.Command{ID: "inner", Input: 1}, pgtest.MustNotRun(t))
			require.ErrorIs(t, err, metered.ErrNested)
			require.Equal(t, "nested_command", metered.Code(err))
		}
	}
	subscriber := func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
		nested(ctx)
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "inner", Input: 1}, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, metered.ErrNested)
		return nil
	}
	cfg := metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}}
	pool, made := pgtest.SetUp(t, cfg, pgtest.Options{MaxConns: 2})
	c = made
	ctx := t.Context()
	other := pgtest.NewClient(t, pool, metered.Config{})
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		nested(ctx)
		_, err := metered.Do[any](ctx, other, metered.Command{ID: metered.NewID(), Input: 1}, nil)
		require.NoError(t, err, "of another client")
		return pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})(ctx, tx)
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "outer", Input: 1}, fn)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "outer, in a transaction", Input: 1}, fn)
		return err
	}))
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "inner", Input: 1}, nil)
	require.NoError(t, err, "afterwards")
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
		{metered.Command{}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: long}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a\xff"}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a\x00"}, "Command.ID", metered.ErrArgument},
		{metered.Command{ID: "a", Tenant: long}, "Command.Tenant", metered.ErrArgument},
		{metered.Command{ID: "a", Tenant: "\x00"}, "Command.Tenant", metered.ErrArgument},
		{metered.Command{ID: "a", Name: long}, "Command.Name", metered.ErrArgument},
		{metered.Command{ID: "a", Name: "\xc3"}, "Command.Name", metered.ErrArgument},
		{metered.Command{ID: "a", Input: make(chan int)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: math.Inf(1)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: "a\xff"}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: map[string]any{"\xff": 1}}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: []any{json.RawMessage("\"\xff\"")}}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", Input: make([]byte, 1<<20+1)}, "Command.Input", metered.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(-5, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "a", IssuedAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "ffffffff-ffff-7fff-bfff-ffffffffffff"}, "Command.IssuedAt", metered.ErrArgument},
		{metered.Command{ID: "a", Isolation: "snapshot"}, "Command.Isolation", metered.ErrArgument},
		{metered.Command{ID: "a", Isolation: "read uncommitted"}, "Command.Isolation", metered.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("", 1, 0)}}, "charges[0].Scope", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("s", 1, 0), pgtest.Charge("s", 0, 0)}}, "charges[1].Amount", budget.ErrArgument},
		{metered.Command{ID: "a", Charges: many}, "charges", budget.ErrArgument},
		{metered.Command{ID: "a", Sticky: []budget.Charge{{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.Lifetime(-1)}}}}, "charges[0].Limits[0].Max", budget.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: good + "x"}}, "", tokens.ErrInvalid},
		{metered.Command{ID: "a", Token: &metered.Redeem{Subject: "s", Presented: good}}, "purpose", tokens.ErrArgument},
		{metered.Command{ID: "a", Token: &metered.Redeem{Purpose: "p", Presented: good}}, "subject", tokens.ErrArgument},
	} {
		_, err := metered.Do(t.Context(), c, test.cmd, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, test.err, "%+v", test.cmd)
		require.NotEmpty(t, metered.Code(err))
		if test.field != "" {
			var argument *metered.ArgumentError
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
		{metered.Command{ID: "b", IssuedAt: last}, metered.ErrFuture},
		{metered.Command{ID: metered.NewID(), IssuedAt: last}, nil}, // the time in the id counts
	} {
		_, err := metered.Do[any](t.Context(), c, test.cmd, nil)
		require.ErrorIs(t, err, test.err)
	}
}

func TestPurgeOperations_WrongOptionsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	c, err := metered.New(pgtest.Nowhere(t), metered.Config{})
	require.NoError(t, err)
	for _, opts := range []metered.PurgeOptions{
		{}, {OlderThan: time.Second - 1}, {OlderThan: bounds.MaxWindow + 1}, {OlderThan: time.Hour, Batch: -1}, {OlderThan: time.Hour, Batch: 10_001},
	} {
		_, err := c.PurgeOperations(t.Context(), pgtest.Nowhere(t), opts)
		require.ErrorIs(t, err, metered.ErrArgument, "%+v", opts)
	}
}

func TestLookup_AWrongIDIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	for _, id := range [][2]string{{"", ""}, {"\x00", "a"}, {"", "\xff"}, {"", strings.Repeat("x", 256)}} {
		_, err := c.Lookup(t.Context(), pool, id[0], id[1])
		require.ErrorIs(t, err, metered.ErrArgument, "%q", id)
	}
}

func TestNew_WrongConfigIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	for field, cfg := range map[string]metered.Config{
		"Config.Schema":         {Schema: "No"},
		"Config.TokenPrefix":    {TokenPrefix: "no spaces"},
		"Config.SecretKey":      {SecretKey: []byte("short")},
		"Config.LockTimeout":    {LockTimeout: time.Hour + 1},
		"Config.ClockTolerance": {ClockTolerance: -1},
		"Config.MaxFuture":      {MaxFuture: 24*time.Hour + 1},
		"Config.MaxAttempts":    {MaxAttempts: 101},
		"Config.ResolveTimeout": {ResolveTimeout: -1},
	} {
		_, err := metered.New(pool, cfg)
		var argument *metered.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.NotEmpty(t, metered.Code(err))
	}
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	_, err = c.Secret("", "op", "")
	require.ErrorIs(t, err, metered.ErrArgument, "no key")
}

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	tx, cmd := struct{ pgx.Tx }{}, metered.Command{ID: "a", Charges: []budget.Charge{pgtest.Charge("s", 1, 0)}}
	fn := pgtest.MustNotRun(t)
	niltest.Methods(t, c, map[string][]any{
		"Lookup": {pool, "", "a"}, "PurgeOperations": {pool, metered.PurgeOptions{OlderThan: time.Hour}},
		"Secret": {"", "a", ""}, "RunTx": {pgx.TxOptions{}, func(context.Context, pgx.Tx) error { return nil }},
		"Listen": {pool, holds.ListenOptions{}, func(context.Context, metered.Notice) error { return nil }},
	})
	niltest.Func(t, "New", metered.New, pool, metered.Config{})
	niltest.Func(t, "Migrate", metered.Migrate, pool, metered.MigrateOptions{})
	niltest.Func(t, "Validate", metered.Validate, pool, "")
	niltest.Func(t, "DoTx", metered.DoTx[pgtest.Uploaded], niltest.Given{Arg: c}, tx, cmd, niltest.Given{Arg: fn})

	for what, c := range map[string]*metered.Client{"nil": nil, "zero": {}} {
		_, err := metered.Do(t.Context(), c, cmd, fn)
		pgtest.RequireField(t, err, "client", what)
		_, err = metered.DoTx(t.Context(), c, tx, cmd, fn)
		pgtest.RequireField(t, err, "client", what)
	}
}

// As a test of a program's own function might pass it.
func TestTx_TheZeroValueIsOver(t *testing.T) {
	t.Parallel()
	ctx, tx := t.Context(), &metered.Tx{}
	b := &pgx.Batch{}
	b.Queue("select 1")
	request, ids := holds.Request{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}, []string{"a"}
	for name, call := range map[string]func() error{
		"Exec":      func() error { _, err := tx.Exec(ctx, "select 1"); return err },
		"Query":     func() error { _, err := tx.Query(ctx, "select 1"); return err },
		"QueryRow":  func() error { return tx.QueryRow(ctx, "select 1").Scan() },
		"SendBatch": func() error { return tx.SendBatch(ctx, b).Close() },
		"Prepare":   func() error { _, err := tx.Prepare(ctx, "p", "select 1"); return err },
		"CopyFrom":  func() error { _, err := tx.CopyFrom(ctx, nil, nil, nil); return err },
		"Begin":     func() error { _, err := tx.Begin(ctx); return err },
		"Charge":    func() error { return tx.Charge(pgtest.Charge("s", 1, 0)) },
		"Credit":    func() error { return tx.Credit(budget.Credit{Scope: "s", Amount: 1}) },
		"Refund":    func() error { return tx.Refund(budget.Refund{Scope: "s", Seq: 1, Amount: 1}) },
		"Enqueue":   func() error { _, err := tx.Enqueue(ctx, pgtest.Process{}, nil); return err },
		"Secret":    func() error { _, err := tx.Secret("x"); return err },
		"Place":     func() error { _, err := tx.Place(ctx, request, nil); return err },
		"Claim":     func() error { _, err := tx.Claim(ctx, holds.Claim{}, nil); return err },
		"Capture":   func() error { return tx.Capture(holds.Capture{IDs: ids}) },
		"Release":   func() error { return tx.Release(holds.Release{IDs: ids}) },
		"Extend":    func() error { return tx.Extend(holds.Extend{IDs: ids, By: time.Second}) },
		"Return":    func() error { return tx.Return(holds.Return{IDs: ids}) },
	} {
		require.NotPanics(t, func() { require.ErrorIs(t, call(), metered.ErrTxDone, name) }, name)
	}
	require.NotPanics(t, func() { large := tx.LargeObjects(); _, _ = large.Create(ctx, 0) })
}

func TestSecret_AReplayCanShowTheTokenThatTheCommandMinted(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{SecretKey: pgtest.SecretKey})
	ctx := t.Context()
	cmd := metered.Command{Tenant: "ns", ID: "op"}
	var minted string
	invite := func(ctx context.Context, tx *metered.Tx) (map[string]string, error) {
		secret, err := tx.Secret("invitation")
		require.NoError(t, err)
		m, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "invite", Subject: "bob", Secret: secret})
		if err != nil {
			return nil, err
		}
		minted = m.Token.Reveal()
		return map[string]string{"digest": m.Digest.String()}, nil
	}
	_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (map[string]string, error) {
		_, err := invite(ctx, tx)
		require.NoError(t, err)
		return nil, pgtest.ErrOwn
	})
	require.ErrorIs(t, err, pgtest.ErrOwn)
	failed := minted
	out, err := metered.Do(ctx, c, cmd, invite)
	require.NoError(t, err)
	require.Equal(t, failed, minted, "each attempt mints the same")

	again, err := metered.Do(ctx, pgtest.NewClient(t, pool, metered.Config{SecretKey: pgtest.SecretKey}), cmd, invite)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Result, again.Result)
	secret, err := c.Secret("ns", "op", "invitation")
	require.NoError(t, err)
	shown, err := c.Tokens.Token(secret)
	require.NoError(t, err)
	require.Equal(t, minted, shown.Reveal())

	// No other operation, tenant, label or key gives it.
	seen := map[string]bool{minted: true}
	for _, parts := range [][3]string{{"ns", "op", ""}, {"ns", "op", "x"}, {"", "op", "invitation"}, {"ns", "op2", "invitation"}, {"nso", "p", "invitation"}} {
		secret, err := c.Secret(parts[0], parts[1], parts[2])
		require.NoError(t, err)
		token, err := c.Tokens.Token(secret)
		require.NoError(t, err)
		require.False(t, seen[token.Reveal()])
		seen[token.Reveal()] = true
	}
	_, err = metered.Do(ctx, pgtest.NewClient(t, pool, metered.Config{}), metered.Command{ID: "no key"}, func(_ context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Secret("invitation")
		return nil, err
	})
	require.ErrorIs(t, err, metered.ErrArgument)

	// The stored rows do not give the token away.
	_, body, _ := strings.Cut(minted, "_")
	for _, table := range []string{"metered.operations", "metered.tokens", "metered.ledger"} {
		require.Zero(t, pgtest.Value[int](t, pool, "select count(*) from "+table+" x where position($1 in x::text || coalesce(convert_from("+
			map[bool]string{true: "x.result", false: "null"}[table == "metered.operations"]+", 'utf8'), '')) > 0", body), table)
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "redeem", Token: &metered.Redeem{Purpose: "invite", Subject: "bob", Presented: shown.Reveal()}},
		func(_ context.Context, tx *metered.Tx) (any, error) {
			require.Equal(t, "invite", tx.Grant.Purpose)
			return nil, nil
		})
	require.NoError(t, err)
}

func TestNew_CopiesTheKey(t *testing.T) {
	t.Parallel()
	key := slices.Clone(pgtest.SecretKey)
	c, err := metered.New(pgtest.Nowhere(t), metered.Config{SecretKey: key})
	require.NoError(t, err)
	before, err := c.Secret("", "op", "")
	require.NoError(t, err)
	clear(key) // the caller's, who may want it out of memory
	after, err := c.Secret("", "op", "")
	require.NoError(t, err)
	require.Equal(t, textOf(t, c, before), textOf(t, c, after))
}

func textOf(t *testing.T, c *metered.Client, secret tokens.Secret) string {
	t.Helper()
	token, err := c.Tokens.Token(secret)
	require.NoError(t, err)
	return token.Reveal()
}

// A caller can send on the values that the library returns: each field has a name, of one spelling, and no duration
// is a bare number of nanoseconds.
func TestJSON_ReturnedValuesHaveNamesAndUnits(t *testing.T) {
	t.Parallel()
	seen := map[reflect.Type]bool{}
	for _, v := range []any{
		metered.Outcome[int]{}, metered.Operation{}, holdjobs.Ref{}, holdjobs.CleanupArgs{},
		budget.Receipt{}, budget.Usage{}, budget.Entry{}, budget.ExceededError{}, budget.VerifyReport{}, budget.PurgeReport{}, budget.ClockState{},
		holds.Hold{}, holds.Page{}, holds.Event{}, holds.Transition{}, holds.Notice{}, holds.SweepReport{},
		tokens.Info{}, tokens.Grant{}, tokens.Minted{}, jobs.Result{}, jobs.Record{}, httpmetered.Problem{},
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

// A client can demand that each write says who acts, and that each scope was created.
func TestClient_CanDemandAnActorAndScopesThatExist(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{RequireActor: true, MustExist: true})
	ctx := t.Context()
	ann := budget.Note{Actor: "ann"}
	do := func(fn func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, fn) }
	require.NoError(t, do(func(tx pgx.Tx) error { _, err := c.Budget.Create(ctx, tx, "s"); return err }))
	calls := map[string]func(tx pgx.Tx, scope string, note budget.Note) error{
		"charge": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Note: note})
			return err
		},
		"credit": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 1, Note: note})
			return err
		},
		"place": func(tx pgx.Tx, scope string, note budget.Note) error {
			_, err := c.Holds.Place(ctx, tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1}}, Note: note})
			return err
		},
		"capture more than is held": func(tx pgx.Tx, scope string, note budget.Note) error {
			h, err := c.Holds.Place(ctx, tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1}}, Note: ann})
			if err == nil {
				_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: scope, Amount: 2}}, Over: holds.OverAllowed, Note: note})
			}
			return err
		},
	}
	for name, call := range calls {
		require.NoError(t, do(func(tx pgx.Tx) error { return call(tx, "s", ann) }), name)
		require.ErrorIs(t, do(func(tx pgx.Tx) error { return call(tx, "s", budget.Note{}) }), metered.ErrArgument, name)
		require.ErrorIs(t, do(func(tx pgx.Tx) error { return call(tx, "mistyped", ann) }), budget.ErrScopeUnknown, name)
	}
	require.ErrorIs(t, do(func(tx pgx.Tx) error {
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: 1, Amount: 1})
		return err
	}), metered.ErrArgument)
	require.ErrorIs(t, do(func(tx pgx.Tx) error {
		_, err := c.Budget.RepairClock(ctx, tx, "s", budget.Note{})
		return err
	}), metered.ErrArgument)
}
