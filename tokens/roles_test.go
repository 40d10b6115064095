package tokens_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

// An application's role has these and nothing else. In the database itself, not
// the cluster, is nothing to drop afterwards but the role.
const appRoleSQL = `
revoke execute on all functions in schema metered from public;
grant usage on schema metered to $role;
grant execute on function
    metered.mint_tokens(metered.new_token[], int),
    metered.replace_token(bigint, metered.new_token, int),
    metered.consume_token(bytea, text, text, int),
    metered.consume_token_plain(bytea, text, text, int),
    metered.inspect_token(bytea, text, text),
    metered.revoke_token(bytea, int),
    metered.revoke_tokens(text, text, int)
    to $role`

func TestRoles_AnApplicationNeedsNothingButExecute(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, store := pgtest.Open(t), newStore(t)
	app := pgtest.AsRole(t, owner, nil, appRoleSQL)
	m := tokens.Mint{Purpose: "p", Subject: "s", Payload: 1, Uses: 2}

	minted := mint(t, app, store, m)
	_, err := store.Inspect(ctx, app, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	_, err = consume(app, store, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	replaced, err := replace(app, store, m)
	require.NoError(t, err)
	require.EqualValues(t, 1, replaced.Replaced)
	require.True(t, revoke(t, app, store, replaced.Digest))
	require.NoError(t, inTx(app, func(tx pgx.Tx) error {
		_, err := store.RevokeSubject(ctx, tx, "p", "s")
		return err
	}))

	for _, forbidden := range []string{
		"insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject) values ('', now(), now(), 1, '', '')",
		"update metered.tokens set used = 0",
		"delete from metered.tokens",
		"truncate metered.tokens",
		"select metered.purge_tokens(null, now(), 1000)",
		"create or replace function metered.clock() returns timestamptz language sql as 'select now()'",
	} {
		_, err := app.Exec(ctx, forbidden)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), "%s: %v", forbidden, err)
	}
	_, err = purge.Tokens.Delete(ctx, app, purge.Options{})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

// A role that calls the functions past the library gets the reason of the refusal, and nothing from a token that has
// another subject, or is no longer good.
func TestRoles_ARefusalShowsNothingOfTheToken(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, owner, noon)
	app := pgtest.AsRole(t, owner, nil, appRoleSQL)
	m := tokens.Mint{Purpose: "p", Subject: "s", Payload: "secret", TTL: time.Minute}
	live, used, revoked := mint(t, app, store, m), mint(t, app, store, m), mint(t, app, store, m)
	_, err := consume(app, store, "p", "s", used.Token.Reveal())
	require.NoError(t, err)
	require.True(t, revoke(t, app, store, revoked.Digest))
	ask := func(want string, digest tokens.Digest, purpose, subject string) {
		t.Helper()
		for _, function := range []string{"inspect_token", "consume_token"} {
			var status string
			var known int
			require.NoError(t, app.QueryRow(ctx, `select status, num_nonnulls(payload, uses_left, minted_at, expires_at, consumed_at)
				from metered.`+function+`($1, $2, $3)`, digest[:], purpose, subject).Scan(&status, &known))
			require.Equal(t, want, status, function)
			require.Zero(t, known, "%s of one that is %s", function, status)
		}
		var answer []byte
		require.NoError(t, app.QueryRow(ctx, "select metered.consume_token_plain($1, $2, $3, 5000)", digest[:], purpose, subject).Scan(&answer))
		require.Equal(t, want, string(answer))
	}
	ask("unknown", tokens.Digest{}, "p", "s")
	ask("purpose", live.Digest, "another", "s")
	ask("subject", live.Digest, "p", "another")
	ask("used", used.Digest, "p", "s")
	ask("revoked", revoked.Digest, "p", "s")
	clock.Advance(time.Minute)
	ask("expired", live.Digest, "p", "s")
}

func TestRoles_AMaintenanceRoleCanPurgeAndDeleteNothingElse(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, owner, noon)
	mintOf(t, owner, store, 5, time.Second)
	clock.Advance(time.Hour)
	stranger := pgtest.AsRole(t, owner, nil, `grant usage on schema metered to $role`)
	_, err := purge.Tokens.Delete(ctx, stranger, purge.Options{})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), "%v", err)

	janitor := pgtest.AsRole(t, owner, nil, `grant usage on schema metered to $role;
		grant execute on function metered.purge_tokens(timestamptz, timestamptz, int), metered.clock() to $role`)
	deleted, err := purge.Tokens.Delete(ctx, janitor, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	require.EqualValues(t, 5, deleted)
	_, err = janitor.Exec(ctx, "delete from metered.tokens")
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

// A function that trusted its caller's search_path would run the caller's
// operators as the owner.
func TestRoles_ACallersOperatorsAreNotUsed(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	_, err := pool.Exec(ctx, `
		create schema trap;
		create function trap.same(text, text) returns boolean language sql as 'select true';
		create operator trap.= (leftarg = text, rightarg = text, function = trap.same)`)
	require.NoError(t, err)
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "set local search_path = trap, pg_catalog")
		require.NoError(t, err)
		_, err = store.Consume(ctx, tx, "p", "another", minted.Token.Reveal())
		requireInvalid(t, err, "subject")
		return nil
	}))
}
