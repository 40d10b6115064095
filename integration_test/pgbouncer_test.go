package integration_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/maintain"
	"github.com/pgmetered/metered/notary"
	"github.com/pgmetered/metered/privacy"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/sqlmetered"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

var modes = []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol}

// Every call, in every mode of pgx, through PgBouncer in transaction mode: docs/pgbouncer.md has the table.
func TestPgBouncer_EveryCallInEveryMode(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	_, version := pgtest.BouncerVersion(t)
	for _, prepared := range []int{0, 200} {
		for _, mode := range modes {
			t.Run(fmt.Sprintf("max_prepared_statements %d/%s", prepared, mode), func(t *testing.T) {
				t.Parallel()
				if prepared > 0 && !pgtest.TracksStatements(version) {
					t.Skipf("max_prepared_statements came with PgBouncer 1.21; this is %d.%d", version[0], version[1])
				}
				// The unnamed statement of describe_exec is not tracked.
				works := mode != pgx.QueryExecModeDescribeExec && (mode != pgx.QueryExecModeCacheStatement || prepared > 0)
				failed := everyCall(t, mode, prepared, nil)
				t.Logf("%d calls fail", len(failed))
				if works {
					require.Empty(t, failed)
					return
				}
				unprepared := 0
				for _, err := range failed {
					var answer *pgconn.PgError
					if errors.As(err, &answer) && slices.Contains([]string{"26000", "42P05", "08P01"}, answer.Code) {
						unprepared++
					}
				}
				require.NotZero(t, unprepared, "it works by now: say so in docs/pgbouncer.md")
			})
		}
	}
}

// Settings of the database reach the connections that PgBouncer opens, and change no call in the modes that get text.
func TestPgBouncer_EveryCallUnderUnusualSettings(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	for name, mode := range map[string]pgx.QueryExecMode{
		"German dates": pgx.QueryExecModeExec, "Postgres dates, no null in an array": pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(name+"/"+mode.String(), func(t *testing.T) {
			t.Parallel()
			require.Empty(t, everyCall(t, mode, 0, unusual[name]))
		})
	}
}

// everyCall makes each call and returns the errors. A client without the bouncer prepares the data. The database has the
// settings for all connections that are opened from then on.
func everyCall(t *testing.T, mode pgx.QueryExecMode, prepared int, settings map[string]string) map[string]error {
	direct, d := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	for setting, value := range settings {
		pgtest.Execute(t, direct, fmt.Sprintf("alter database %s set %s = '%s'", pgx.Identifier{direct.Config().ConnConfig.Database}.Sanitize(), setting, value))
	}
	port := pgtest.Bounce(t, direct, prepared)
	through := func(c *pgxpool.Config) {
		c.MaxConns = 8
		c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.Fallbacks = "127.0.0.1", port, nil
		c.ConnConfig.DefaultQueryExecMode = mode
	}
	pool := pgtest.Reopen(t, direct, through)
	require.NoError(t, pool.Ping(t.Context()))
	for setting, value := range settings {
		require.Contains(t, pgtest.Value[string](t, pool, "select current_setting($1)", setting), value)
	}
	rounds := 1
	if prepared > 0 || mode == pgx.QueryExecModeCacheDescribe {
		rounds = 2 // the second finds the statements that the first has cached
	}
	return everyCallBy(&behind{t: t, direct: direct, d: d, pool: pool, c: pgtest.NewClient(t, pool, metered.Config{})}, rounds)
}

// everyCallBy makes each call by a client and its pool, where another one prepares the data, and returns the errors.
func everyCallBy(b *behind, rounds int) map[string]error {
	b.failed, b.called = map[string]error{}, map[string]bool{}
	for range rounds {
		b.round++
		b.commands()
		b.ledger()
		b.batches()
		b.wallets()
		b.holds()
		b.tokens()
		b.jobs()
		b.leases()
		b.others()
		b.records()
	}
	b.complete()
	report, err := b.d.Budget.Verify(b.t.Context(), b.direct, budget.VerifyOptions{})
	require.NoError(b.t, err)
	require.Empty(b.t, report.Differences)
	return b.failed
}

// behind is a client behind a bouncer, or another way to reach the database.
type behind struct {
	t      *testing.T
	direct *pgxpool.Pool
	d      *metered.Client // by direct
	pool   *pgxpool.Pool
	c      *metered.Client // by pool
	schema string          // "" means metered
	sql    bool            // transactions are those of database/sql
	round  int
	failed map[string]error
	called map[string]bool
}

// try makes a call of the bouncer's.
func (b *behind) try(call string, f func(ctx context.Context) error) {
	b.called[call] = true
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	if err := f(ctx); err != nil {
		b.failed[call] = fmt.Errorf("%s: %w", call, err)
	}
}

// tx makes a call in a transaction.
func (b *behind) tx(call string, f func(ctx context.Context, tx pgx.Tx) error) {
	b.try(call, func(ctx context.Context) error {
		if b.sql {
			return b.sqlTx(ctx, f)
		}
		return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return f(ctx, tx) })
	})
}

// sqlTx runs f in a transaction of database/sql.
func (b *behind) sqlTx(ctx context.Context, f func(ctx context.Context, tx pgx.Tx) error) error {
	db := stdlib.OpenDBFromPool(b.pool)
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := sqlmetered.InTx(ctx, tx, f); err != nil {
		return err
	}
	return sqlmetered.Commit(tx)
}

// given makes something without the bouncer.
func given[T any](b *behind, f func(ctx context.Context, tx pgx.Tx) (T, error)) (made T) {
	b.t.Helper()
	require.NoError(b.t, pgx.BeginFunc(b.t.Context(), b.direct, func(tx pgx.Tx) (err error) {
		made, err = f(b.t.Context(), tx)
		return err
	}))
	return made
}

// id is new in each round.
func (b *behind) id(name string) string { return fmt.Sprintf("%s-%d", name, b.round) }

// second leaves a result out.
func second[T any](_ T, err error) error { return err }

var hourly = []budget.Limit{{Max: 1000, Window: time.Hour}}

func (b *behind) commands() {
	var secret string
	given(b, func(ctx context.Context, tx pgx.Tx) (any, error) {
		minted, err := b.d.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		secret = minted.Token.Reveal()
		return nil, err
	})
	command := func(id string) metered.Command {
		return metered.Command{ID: b.id(id), Input: 1, Charges: []budget.Charge{{Scope: "units", Amount: 1, Limits: hourly}}, EarlyLook: true}
	}
	book, err := wallet.New(b.c.Budget, wallet.Config{Overdraft: 1000})
	require.NoError(b.t, err)
	all := func(ctx context.Context, tx *metered.Tx) (any, error) {
		drawn := book.Charge("drawn", 1)
		drawn.Lots = true
		if err := tx.Charge(drawn); err != nil {
			return nil, err
		}
		err := tx.Charge(budget.Charge{Scope: "up to", Amount: 9, Limits: hourly, UpTo: true})
		if err == nil {
			_, err = tx.Enqueue(ctx, process{b.id("job")}, &jobs.Options{Key: b.id("command")})
		}
		if err == nil {
			_, err = tx.Place(ctx, holds.Placement{Lines: []holds.Line{{Scope: "seats", Amount: 1}}, TTL: time.Hour}, nil)
		}
		return nil, err
	}
	whole := command("do")
	whole.Token = &metered.Redeem{Purpose: "p", Subject: "s", Presented: secret}
	whole.Sticky = []budget.Charge{{Scope: "tries", Amount: 1, Limits: hourly}}
	b.try("metered.Do", func(ctx context.Context) error { return second(metered.Do(ctx, b.c, whole, all)) })
	b.try("metered.Do, a replay", func(ctx context.Context) error { return second(metered.Do(ctx, b.c, whole, all)) })
	pgtest.Execute(b.t, b.direct, "create table if not exists metered.declared (id text primary key); grant insert on metered.declared to public")
	declared := command("declared")
	declared.Statements = &pgx.Batch{}
	declared.Statements.Queue("insert into metered.declared values ($1)", declared.ID)
	for _, call := range []string{"metered.Do, of statements", "metered.Do, of statements, a replay"} {
		b.try(call, func(ctx context.Context) error { return second(metered.Do[any](ctx, b.c, declared, nil)) })
	}
	early := command("early")
	early.EarlyRelease, early.LSN, early.Isolation = true, true, pgx.Serializable
	b.try("metered.Open", func(ctx context.Context) error {
		r := metered.Reservation{ID: metered.NewID(), Lines: []holds.Line{{Scope: "seats", Amount: 2}}}
		s, err := metered.Open[any](ctx, b.c, r)
		if err != nil {
			return err
		}
		defer s.Close()
		if err := s.Cancel(ctx, "enough"); err != nil {
			return err
		}
		if s, err = metered.Open[any](ctx, b.c, r); err != nil {
			return err
		}
		defer s.Close()
		if _, err = s.Settle(ctx, metered.Cost{All: true}, nil); err != nil {
			return err
		}
		_, err = metered.Open[any](ctx, b.c, r)
		return err
	})
	b.tx("metered.OpenTx", func(ctx context.Context, tx pgx.Tx) error {
		s, err := metered.OpenTx[any](ctx, b.c, tx, metered.Reservation{ID: metered.NewID(), Lines: []holds.Line{{Scope: "seats", Amount: 2}}})
		if err != nil {
			return err
		}
		defer s.Close()
		return second(s.SettleTx(ctx, tx, metered.Cost{All: true}, nil))
	})
	b.try("metered.Do, early release", func(ctx context.Context) error { return second(metered.Do[any](ctx, b.c, early, nil)) })
	refused := command("refused")
	refused.RecordRefusal, refused.Charges = true, []budget.Charge{{Scope: "units", Amount: 2000, Limits: hourly}}
	b.try("metered.Do, refused", func(ctx context.Context) error {
		if err := second(metered.Do[any](ctx, b.c, refused, nil)); !errors.Is(err, budget.ErrExceeded) {
			return err
		}
		return nil
	})
	b.tx("metered.DoTx", func(ctx context.Context, tx pgx.Tx) error {
		return second(metered.DoTx(ctx, b.c, tx, command("dotx"), all))
	})
	b.try("sqlmetered.DoTx", func(ctx context.Context) error {
		db := stdlib.OpenDBFromPool(b.pool)
		defer db.Close()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := second(sqlmetered.DoTx(ctx, b.c, tx, command("sql"), all)); err != nil {
			return err
		}
		s, err := sqlmetered.OpenTx[any](ctx, b.c, tx, metered.Reservation{ID: metered.NewID(), Lines: []holds.Line{{Scope: "seats", Amount: 2}}})
		if err != nil {
			return err
		}
		defer s.Close()
		if err := second(sqlmetered.SettleTx(ctx, s, tx, metered.Cost{All: true}, nil)); err != nil {
			return err
		}
		return sqlmetered.Commit(tx)
	})
	b.try("Client.RunTx", func(ctx context.Context) error {
		return b.c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			return second(b.c.Budget.Charge(ctx, tx, budget.Charge{Scope: "units", Amount: 1}))
		})
	})
	recorded := given(b, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return b.id("found"), second(metered.DoTx[any](ctx, b.d, tx, metered.Command{ID: b.id("found")}, nil))
	})
	b.try("Client.Lookup", func(ctx context.Context) error { return second(b.c.Lookup(ctx, b.pool, "", recorded)) })
	b.try("maintain.Run", func(ctx context.Context) error {
		return second(maintain.Run(ctx, b.pool, maintain.Parts{Ledger: b.c.Budget},
			maintain.Policy{NoSweeps: true, Operations: time.Hour, JobKeys: time.Hour}))
	})
}

func (b *behind) ledger() {
	l, scope := b.c.Budget, b.id("ledger")
	charge := budget.Charge{Scope: scope, Amount: 2, Limits: hourly}
	posted := given(b, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		return b.d.Budget.Charge(ctx, tx, charge)
	}).Entries[0]
	b.tx("Ledger.Charge", func(ctx context.Context, tx pgx.Tx) error { return second(l.Charge(ctx, tx, charge)) })
	b.tx("Ledger.Charge up to", func(ctx context.Context, tx pgx.Tx) error {
		upTo := charge
		upTo.UpTo = true
		return second(l.Charge(ctx, tx, upTo, budget.Charge{Scope: b.id("above"), Amount: 2, UpTo: true, Limits: []budget.Limit{budget.Lifetime(1)}}))
	})
	b.tx("Ledger.ChargeEach", func(ctx context.Context, tx pgx.Tx) error { return second(l.ChargeEach(ctx, tx, charge, charge)) })
	b.try("Ledger.ChargeNow", func(ctx context.Context) error { return second(l.ChargeNow(ctx, b.pool, charge)) })
	b.try("Ledger.Check", func(ctx context.Context) error { return second(l.Check(ctx, b.pool, charge)) })
	b.tx("Ledger.Credit", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 1}))
	})
	b.tx("Ledger.Refund", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: posted.Seq, Amount: 1}))
	})
	b.tx("Ledger.Ingest", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.Ingest(ctx, tx, budget.UsageEvent{ID: b.id("event"), Charge: charge, OccurredAt: time.Now()}))
	})
	b.tx("Ledger.Lock", func(ctx context.Context, tx pgx.Tx) error { return l.Lock(ctx, tx, scope) })
	b.try("Ledger.Entries", func(ctx context.Context) error {
		for _, err := range l.Entries(ctx, b.pool, scope, budget.EntriesOptions{}) {
			if err != nil {
				return err
			}
		}
		return nil
	})
	b.try("Ledger.Usage", func(ctx context.Context) error {
		return second(l.Usage(ctx, b.pool, budget.Query{Scope: scope, Window: time.Hour}))
	})
	from, to := time.Now().Add(-48*time.Hour), time.Now().Add(time.Hour)
	b.try("Ledger.UsageBetween", func(ctx context.Context) error { return second(l.UsageBetween(ctx, b.pool, scope, from, to)) })
	b.try("Ledger.Series", func(ctx context.Context) error {
		return second(l.Series(ctx, b.pool, scope, from, to, budget.Day, time.UTC))
	})
	b.try("Ledger.WhatIf", func(ctx context.Context) error {
		return second(l.WhatIf(ctx, b.pool, budget.PerWindow(1, time.Hour), from, to, scope))
	})
	b.try("Ledger.Entries, by note", func(ctx context.Context) error {
		for _, err := range l.Entries(ctx, b.pool, scope, budget.EntriesOptions{Note: budget.Note{Actor: "ann"}}) {
			if err != nil {
				return err
			}
		}
		return nil
	})
	b.try("Ledger.ClockAhead", func(ctx context.Context) error {
		for _, err := range l.ClockAhead(ctx, b.pool, time.Minute) {
			if err != nil {
				return err
			}
		}
		return nil
	})
	b.try("Ledger.Verify", func(ctx context.Context) error { return second(l.Verify(ctx, b.pool, budget.VerifyOptions{})) })
	b.try("Ledger.Purge", func(ctx context.Context) error {
		return second(l.Purge(ctx, b.pool, budget.PurgeOptions{OlderThan: time.Hour}))
	})
	b.try("Ledger.NumberFeed", func(ctx context.Context) error { return second(l.NumberFeed(ctx, b.pool)) })
	b.try("Ledger.Feed", func(ctx context.Context) error {
		for _, err := range l.Feed(ctx, b.pool, "", budget.FeedOptions{Max: 1}) {
			return err
		}
		return nil
	})
	b.tx("Ledger.ConsumeFeed", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.ConsumeFeed(ctx, tx, "c", budget.FeedOptions{}))
	})
	b.try("Ledger.FeedConsumers", func(ctx context.Context) error { return second(l.FeedConsumers(ctx, b.pool)) })
	b.tx("Ledger.DropFeedConsumer", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.DropFeedConsumer(ctx, tx, "c"))
	})
	b.try("Ledger.RunFeed", func(ctx context.Context) error {
		done := errors.New("done")
		err := l.RunFeed(ctx, b.pool, "followed", budget.FeedOptions{}, func(context.Context, pgx.Tx, []budget.FeedEntry) error { return done })
		if errors.Is(err, done) {
			return nil
		}
		return err
	})
	b.tx("Ledger.RepairClock", func(ctx context.Context, tx pgx.Tx) error {
		return second(l.RepairClock(ctx, tx, scope, budget.Note{}))
	})
	b.tx("Ledger.Create", func(ctx context.Context, tx pgx.Tx) error { return second(l.Create(ctx, tx, b.id("created"))) })
	made := given(b, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return b.id("made"), second(b.d.Budget.Create(ctx, tx, b.id("made")))
	})
	b.tx("Ledger.Retire", func(ctx context.Context, tx pgx.Tx) error { return second(l.Retire(ctx, tx, made)) })
	b.tx("Ledger.Restore", func(ctx context.Context, tx pgx.Tx) error { return second(l.Restore(ctx, tx, made)) })
	b.try("Ledger.Resources", func(ctx context.Context) error {
		for _, err := range l.Resources(ctx, b.pool, "") {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *behind) wallets() {
	book, err := wallet.New(b.c.Budget, wallet.Config{})
	require.NoError(b.t, err)
	direct, err := wallet.New(b.d.Budget, wallet.Config{})
	require.NoError(b.t, err)
	name := b.id("wallet")
	granted := given(b, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return direct.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 100})
	})
	b.tx("wallet.Book.Grant", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 1, Ends: wallet.After(time.Hour), Reference: "r"}))
	})
	b.tx("wallet.Book.Draw", func(ctx context.Context, tx pgx.Tx) error {
		return second(b.c.Budget.Charge(ctx, tx, book.Charge(name, 1)))
	})
	b.tx("wallet.Book.Revoke", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Revoke(ctx, tx, wallet.Revoke{Wallet: name, Lot: granted.Lot, Amount: 1}))
	})
	b.tx("wallet.Book.Reinstate", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Reinstate(ctx, tx, wallet.Revoke{Wallet: name, Lot: granted.Lot}))
	})
	b.tx("wallet.Book.SetEnd", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: name, Lot: granted.Lot, Expires: time.Now().Add(24 * time.Hour)}))
	})
	plan := b.id("plan")
	given(b, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return direct.Grant(ctx, tx, wallet.Grant{Wallet: plan, Amount: 100, Reference: "p", Ends: wallet.EachPeriod(budget.Per(1, budget.Month, time.UTC, time.Time{}).Period)})
	})
	b.tx("wallet.Book.Change", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Change(ctx, tx, wallet.Change{Wallet: plan, Reference: "c", Plan: "p", AtEnd: true}))
	})
	b.tx("wallet.Book.Overage", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Overage(ctx, tx, wallet.Overage{Wallet: plan, Plan: "p"}))
	})
	b.tx("wallet.Book.Rollover", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Rollover(ctx, tx, wallet.Rollover{Wallet: name, Lot: granted.Lot, Cap: 1, For: time.Hour}))
	})
	b.tx("wallet.Book.Expire", func(ctx context.Context, tx pgx.Tx) error { return second(book.Expire(ctx, tx, name)) })
	b.try("wallet.Book.Sweep", func(ctx context.Context) error { return second(book.Sweep(ctx, b.pool, wallet.SweepOptions{})) })
	b.try("wallet.Book.Balance", func(ctx context.Context) error { return second(book.Balance(ctx, b.pool, name)) })
	b.try("wallet.Book.Statement", func(ctx context.Context) error {
		for _, err := range book.Statement(ctx, b.pool, name, budget.EntriesOptions{}) {
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *behind) batches() {
	batcher, err := budget.NewBatcher(b.pool, b.c.Budget, budget.BatcherConfig{})
	require.NoError(b.t, err)
	charge := budget.Charge{Scope: "batched", Amount: 1, Limits: hourly}
	b.try("Batcher.Charge", func(ctx context.Context) error { return second(batcher.Charge(ctx, charge)) })
	b.try("Batcher.Ingest", func(ctx context.Context) error {
		return second(batcher.Ingest(ctx, budget.UsageEvent{ID: b.id("batched"), Charge: charge}))
	})
	b.try("Batcher.Close", batcher.Close)
}

// complete checks that no method of the types with calls was left out.
func (b *behind) complete() {
	offline := []string{"Client.Secret", "Ledger.LockKey", "Book.Channel", "Store.Parse", "Store.Token", "Pool.Receipt"}
	// These keep a session, and are for a connection of their own.
	session := []string{"Client.Listen", "Book.Listen", "Enqueuer.Run"}
	offline = append(offline, "wallet.Book.Limit", "wallet.Book.Charge", "wallet.Book.Line")
	for _, made := range []any{b.c, b.c.Budget, &budget.Batcher{}, b.c.Holds, b.c.Tokens, b.c.Jobs, &leases.Pool{}, &leases.Carver{}, &wallet.Book{},
		&notary.Notary{}, &privacy.Register{}} {
		of := reflect.TypeOf(made)
		for i := range of.NumMethod() {
			call := of.Elem().Name() + "." + of.Method(i).Name
			if of.Elem() == reflect.TypeFor[wallet.Book]() {
				call = "wallet." + call // holds.Book is another one
			}
			require.True(b.t, b.called[call] || slices.Contains(offline, call) || slices.Contains(session, call), "call %s too", call)
		}
	}
	for call := range b.called {
		require.False(b.t, strings.Contains(call, "Listen"))
	}
}

func (b *behind) others() {
	b.try("metered.Validate", func(ctx context.Context) error { return second(metered.Validate(ctx, b.pool, "")) })
	b.try("metered.Migrate", func(ctx context.Context) error {
		return second(metered.Migrate(ctx, b.pool, metered.MigrateOptions{River: true}))
	})
	if b.round == 1 {
		b.try("metered.Migrate, a new schema", func(ctx context.Context) error {
			return second(metered.Migrate(ctx, b.pool, metered.MigrateOptions{Schema: "fresh"}))
		})
	}
	lsn, err := replica.CommitLSN(b.t.Context(), b.direct)
	require.NoError(b.t, err)
	b.try("replica.CommitLSN", func(ctx context.Context) error { return second(replica.CommitLSN(ctx, b.pool)) })
	b.try("replica.ReadLSN", func(ctx context.Context) error { return second(replica.ReadLSN(ctx, b.pool)) })
	b.try("replica.ReadAt", func(ctx context.Context) error {
		return replica.ReadAt(ctx, b.pool, lsn, 0, func(ctx context.Context, conn *pgx.Conn) error {
			return second(b.c.Budget.Usage(ctx, conn, budget.Query{Scope: "units"}))
		})
	})
}
