package tokens_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

var ctx = context.Background()

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// newStore waits a minute for locks: a busy machine can need more than five seconds.
func newStore(t testing.TB) *tokens.Store {
	t.Helper()
	store, err := tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: time.Minute})
	require.NoError(t, err)
	return store
}

// inTx commits the work of f, unless f fails.
func inTx(pool *pgxpool.Pool, f func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, pool, f)
}

// retried runs f in a transaction of its own until it gets past serialization
// failures and deadlocks, and counts those.
func retried(pool *pgxpool.Pool, level pgx.TxIsoLevel, f func(pgx.Tx) error) (retries int, err error) {
	for {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, f)
		if s := sqlstate.Of(err); s != sqlstate.SerializationFailure && s != sqlstate.DeadlockDetected {
			return retries, err
		}
		retries++
	}
}

func mint(t testing.TB, pool *pgxpool.Pool, store *tokens.Store, m tokens.Mint) tokens.Minted {
	t.Helper()
	var minted tokens.Minted
	require.NoError(t, inTx(pool, func(tx pgx.Tx) (err error) {
		minted, err = store.Mint(ctx, tx, m)
		return err
	}))
	return minted
}

func consume(pool *pgxpool.Pool, store *tokens.Store, purpose, subject, presented string) (tokens.Grant, error) {
	var grant tokens.Grant
	err := inTx(pool, func(tx pgx.Tx) (err error) {
		grant, err = store.Consume(ctx, tx, purpose, subject, presented)
		return err
	})
	return grant, err
}

// requireInvalid requires the one outward answer, and the reason behind it.
func requireInvalid(t testing.TB, err error, want string) {
	t.Helper()
	require.ErrorIs(t, err, tokens.ErrInvalid)
	require.EqualError(t, err, tokens.ErrInvalid.Error())
	require.Equal(t, "token_invalid", fault.Code(err))
	var invalid *tokens.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, want, invalid.Reason())
}

func requireArgument(t testing.TB, err error, field string) {
	t.Helper()
	require.ErrorIs(t, err, budget.ErrArgument)
	require.Equal(t, "invalid_argument", fault.Code(err))
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, field, argument.Field)
}

// noSQL is a transaction that fails the test when it is used. Its other methods
// panic.
type noSQL struct {
	pgx.Tx
	t testing.TB
}

func (n noSQL) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	n.t.Helper()
	n.t.Errorf("a query was made: %s", sql)
	return noRow{}
}

type noRow struct{}

func (noRow) Scan(...any) error { return errors.New("no row") }

func TestNew_RefusesBadConfiguration(t *testing.T) {
	t.Parallel()
	for field, configs := range map[string][]tokens.Config{
		"Config.Schema": {{Schema: "Metered"}, {Schema: `x"; drop`}, {Schema: "pg_x"}, {Schema: strings.Repeat("a", 64)}},
		"Config.Prefix": {{Prefix: "_a"}, {Prefix: "a_"}, {Prefix: "1a"}, {Prefix: "a-b"}, {Prefix: "a b"}, {Prefix: "ä"},
			{Prefix: "a\n"}, {Prefix: strings.Repeat("a", 32+1)}},
		"Config.LockTimeout": {{LockTimeout: -1}, {LockTimeout: time.Millisecond - 1}, {LockTimeout: time.Hour + 1}},
	} {
		for _, config := range configs {
			_, err := tokens.New(config)
			requireArgument(t, err, field)
		}
	}
}

func TestNew_AcceptsTheBounds(t *testing.T) {
	t.Parallel()
	for _, config := range []tokens.Config{
		{},
		{Prefix: "a"},
		{Prefix: strings.Repeat("a", 32), LockTimeout: time.Hour, Schema: "other_1"},
		{Prefix: "A__9", LockTimeout: time.Millisecond},
	} {
		_, err := tokens.New(config)
		require.NoError(t, err, "%+v", config)
	}
}

// badNames are refused as purposes and subjects.
func badNames(maxLen int) map[string]string {
	return map[string]string{
		"empty":     "",
		"too long":  strings.Repeat("x", maxLen+1),
		"not UTF-8": "a\xffb",
		"zero byte": "a\x00b",
	}
}

func TestArguments_AreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	tx := noSQL{t: t}
	token, err := store.Token(must(tokens.Derive(testKey, "x")))
	require.NoError(t, err)
	text := token.Reveal()

	calls := map[string]func(purpose, subject string) error{
		"Mint.": func(p, s string) error {
			_, err := store.Mint(ctx, tx, tokens.Mint{Purpose: p, Subject: s})
			return err
		},
		"Mints[1].": func(p, s string) error {
			_, err := store.MintMany(ctx, tx, []tokens.Mint{{Purpose: "p", Subject: "s"}, {Purpose: p, Subject: s}})
			return err
		},
		"Mint. ": func(p, s string) error {
			_, err := store.Replace(ctx, tx, tokens.Mint{Purpose: p, Subject: s})
			return err
		},
		"": func(p, s string) error {
			_, err := store.Consume(ctx, tx, p, s, text)
			return err
		},
		" ": func(p, s string) error {
			_, err := store.Inspect(ctx, tx, p, s, text)
			return err
		},
		"  ": func(p, s string) error {
			_, err := store.RevokeSubject(ctx, tx, p, s)
			return err
		},
		"   ": func(p, s string) error {
			_, err := present(store, p, s, text)
			return err
		},
	}
	for prefix, call := range calls {
		purpose, subject := "purpose", "subject"
		if prefix = strings.TrimSpace(prefix); prefix != "" {
			purpose, subject = prefix+"Purpose", prefix+"Subject"
		}
		for why, bad := range badNames(128) {
			t.Log(purpose, why)
			requireArgument(t, call(bad, "subject"), purpose)
		}
		for why, bad := range badNames(512) {
			t.Log(subject, why)
			requireArgument(t, call("purpose", bad), subject)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var testKey = must(hexKey("8f1d6b0a93e24c75b1f0a2d35e679c481029384756acbedf0f1e2d3c4b5a6978"))

var noon = time.Date(2031, 4, 5, 12, 0, 0, 0, time.UTC)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	secret := must(tokens.Derive(testKey, "x"))
	token := must(store.Token(secret))
	tx, m := noSQL{t: t}, tokens.Mint{Purpose: "p", Subject: "s"}
	presented := []any{tx, "p", "s", token.Reveal()}
	niltest.Methods(t, store, map[string][]any{
		"Mint": {tx, m}, "MintMany": {tx, []tokens.Mint{m}}, "Replace": {tx, m}, "Consume": presented, "Inspect": presented,
		"Revoke": {tx, token.Digest()}, "RevokeSubject": {tx, "p", "s"},
		"Parse": {token.Reveal()}, "Token": {secret}, "Prefix": {},
	})
}
