package listen_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// hearing runs Listen, and returns the next notice: nothing for a second is none.
func hearing(t *testing.T, pool *pgxpool.Pool, c *metered.Client) func() (metered.CommandNotice, bool) {
	t.Helper()
	heard := make(chan metered.CommandNotice, 1000)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = c.Listen(ctx, pool, holds.ListenOptions{}, func(_ context.Context, n metered.CommandNotice) error { heard <- n; return nil })
	}()
	t.Cleanup(func() { stop(); <-ended })
	require.Equal(t, metered.CommandNotice{Missed: true}, <-heard)
	return func() (metered.CommandNotice, bool) {
		// The notices of earlier commits arrive before this one.
		_, err := pool.Exec(context.Background(), `select pg_notify('metered_commands', '{"id":"end"}')`)
		require.NoError(t, err)
		select {
		case n := <-heard:
			if n.ID == "end" {
				return n, false
			}
			for last := range heard { // of the next call
				if last.ID == "end" {
					return n, true
				}
				t.Errorf("heard besides: %+v", last)
			}
		case <-time.After(time.Until(pgtest.Patience(t))):
			t.Error("nothing is heard")
		}
		return metered.CommandNotice{}, false
	}
}

func TestListen_HearsOfCommittedJobsAndLargeCharges(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	// With no more than the documented grants.
	c := pgtest.NewClient(t, pgtest.AsRole(t, owner, metered.GrantSQL, pgtest.RiverGrantSQL), metered.Config{NotifyJobs: true, NotifyChargesFrom: 100})
	next := hearing(t, owner, c)
	note := budget.Note{Actor: "ann", Reason: odd}
	cmd := metered.Command{ID: odd, Input: 1, Tenant: odd, Name: "buy", Charges: []budget.Charge{
		{Scope: "small", Amount: 99}, {Scope: odd, Amount: 100, Note: note}}}
	var made []jobs.Result
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		made = nil
		for _, opts := range []*jobs.Options{nil, {Key: odd, Tenant: odd}, {Key: odd, Tenant: odd}} { // the third is the second
			r, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, opts)
			if err != nil {
				return nil, err
			}
			made = append(made, r)
		}
		return nil, tx.Charge(budget.Charge{Scope: "parts", Amount: 60}, budget.Charge{Scope: "parts", Amount: 40})
	}
	out, err := metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	require.Len(t, out.Receipt.Entries, 3)
	require.False(t, made[2].Created)
	want := metered.CommandNotice{Tenant: odd, ID: odd, Name: "buy",
		Charges: []budget.Charge{{Scope: odd, Amount: 100, Note: note}, {Scope: "parts", Amount: 100}},
		Jobs: []jobs.Enqueued{{ID: made[0].JobID, Queue: "default", Kind: "process"},
			{ID: made[1].JobID, Queue: "default", Kind: "process", Key: odd, Tenant: odd}}}
	n, ok := next()
	require.True(t, ok)
	require.Equal(t, want, n)

	_, err = metered.Do(t.Context(), c, cmd, fn)
	require.NoError(t, err)
	_, ok = next()
	require.False(t, ok, "of a replay")
	_, err = metered.Do[any](t.Context(), c, metered.Command{ID: "small", Input: 1, Charges: []budget.Charge{pgtest.Charge("a", 99, 0)}}, nil)
	require.NoError(t, err)
	_, ok = next()
	require.False(t, ok, "of what is too small")
}

// odd is a text with characters that mean something in JSON or SQL.
const odd = "a'b\"}]+\\u0000 \\x \n\t\x01 ü 🪑 \u2028 </script>"

func TestListen_HearsNothingThatRolledBack(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{NotifyJobs: true, NotifyChargesFrom: 100})
	next := hearing(t, pool, c)
	ctx := t.Context()
	enqueue := func(tx *metered.Tx) int64 {
		r, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, &jobs.Options{Key: "k"})
		require.NoError(t, err)
		require.True(t, r.Created)
		return r.JobID
	}
	pgtest.Fill(t, pool, c, "full", 5)
	_, err := metered.Do(ctx, c, metered.Command{ID: "refused", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
		enqueue(tx)
		return nil, tx.Charge(pgtest.Charge("a", 100, 0), pgtest.Charge("full", 1, 5))
	})
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = metered.Do(ctx, c, metered.Command{ID: "failed", Input: 1, Charges: []budget.Charge{pgtest.Charge("a", 100, 0)}},
		func(_ context.Context, tx *metered.Tx) (any, error) { enqueue(tx); return nil, pgtest.ErrOwn })
	require.ErrorIs(t, err, pgtest.ErrOwn)
	_, ok := next()
	require.False(t, ok)

	// A savepoint of the function takes a job back.
	var id int64
	partly := func(keep bool) metered.Func[any] {
		return func(ctx context.Context, tx *metered.Tx) (any, error) {
			sub, err := tx.Begin(ctx)
			require.NoError(t, err)
			enqueue(tx)
			require.NoError(t, sub.Rollback(ctx))
			if keep {
				id = enqueue(tx)
			}
			return nil, nil
		}
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "none kept", Input: 1}, partly(false))
	require.NoError(t, err)
	_, ok = next()
	require.False(t, ok)
	_, err = metered.Do(ctx, c, metered.Command{ID: "one kept", Input: 1}, partly(true))
	require.NoError(t, err)
	n, _ := next()
	require.Equal(t, []jobs.Enqueued{{ID: id, Queue: "default", Kind: "process", Key: "k"}}, n.Jobs)

	// In a transaction of the caller's: with its commit, and not without.
	large := func(id string) metered.Command {
		return metered.Command{ID: id, Input: 1, Charges: []budget.Charge{pgtest.Charge("a", 100, 0)}}
	}
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = metered.DoTx[any](ctx, c, tx, large("rolled back"), nil)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	tx, err = pool.Begin(ctx)
	require.NoError(t, err)
	_, err = metered.DoTx[any](ctx, c, tx, large("committed"), nil)
	require.NoError(t, err)
	_, err = metered.DoTx(ctx, c, tx, large("refused"), func(_ context.Context, tx *metered.Tx) (any, error) { return nil, pgtest.ErrOwn })
	require.ErrorIs(t, err, pgtest.ErrOwn)
	_, ok = next()
	require.False(t, ok, "not before the commit")
	require.NoError(t, tx.Commit(ctx))
	n, _ = next()
	require.Equal(t, "committed", n.ID)
}

func TestListen_HearsOfJobsThatAreEnqueuedWithoutACommand(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{})
	pool := pgtest.AsRole(t, owner, metered.GrantSQL, pgtest.RiverGrantSQL)
	c := pgtest.NewClient(t, pool, metered.Config{NotifyJobs: true})
	next := hearing(t, owner, c)
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	sub, err := tx.Begin(ctx)
	require.NoError(t, err)
	_, err = c.Jobs.Enqueue(ctx, sub, pgtest.Process{Name: "undone"}, nil)
	require.NoError(t, err)
	require.NoError(t, sub.Rollback(ctx))
	made, err := c.Jobs.EnqueueMany(ctx, tx, []jobs.Item{{Args: pgtest.Process{Name: "a"}}, {Args: pgtest.Process{Name: "b"}, Options: &jobs.Options{Key: odd, Tenant: odd}},
		{Args: pgtest.Process{Name: "b"}, Options: &jobs.Options{Key: odd, Tenant: odd}}})
	require.NoError(t, err)
	_, err = c.Jobs.Enqueue(ctx, tx, pgtest.Process{Name: "b"}, &jobs.Options{Key: odd, Tenant: odd})
	require.NoError(t, err)
	_, ok := next()
	require.False(t, ok, "before the commit")
	require.NoError(t, tx.Commit(ctx))
	n, ok := next()
	require.True(t, ok)
	require.Equal(t, metered.CommandNotice{Jobs: []jobs.Enqueued{{ID: made[0].JobID, Queue: "default", Kind: "process"},
		{ID: made[1].JobID, Queue: "default", Kind: "process", Key: odd, Tenant: odd}}}, n)

	tx, err = pool.Begin(ctx)
	require.NoError(t, err)
	_, err = c.Jobs.Enqueue(ctx, tx, pgtest.Process{Name: "rolled back"}, nil)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	_, ok = next()
	require.False(t, ok)

	// More than one payload holds.
	items := make([]jobs.Item, 40)
	for i := range items {
		items[i] = jobs.Item{Args: pgtest.Process{Name: "a"}, Options: &jobs.Options{Key: fmt.Sprintf("%03d", i) + strings.Repeat("\x01", 252), Tenant: strings.Repeat("\x01", 255)}}
	}
	conn, err := owner.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(ctx, `listen metered_commands`)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		made, err = c.Jobs.EnqueueMany(ctx, tx, items)
		return err
	}))
	var heard []int64
	for len(heard) < len(items) {
		payload, err := conn.Conn().WaitForNotification(ctx)
		require.NoError(t, err)
		require.Less(t, len(payload.Payload), 8000)
		var n metered.CommandNotice
		require.NoError(t, json.Unmarshal([]byte(payload.Payload), &n))
		for _, j := range n.Jobs {
			heard = append(heard, j.ID)
		}
	}
	for i, r := range made {
		require.Equal(t, r.JobID, heard[i])
	}
}

func TestListen_ALongNoticeIsCut(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{NotifyJobs: true, NotifyChargesFrom: 100})
	next := hearing(t, pool, c)
	long := func(s string) string { return strings.Repeat("\x01", 255-len(s)) + s }
	cmd := metered.Command{ID: long("id"), Input: 1, Tenant: long("tenant"), Name: long("name")}
	note := budget.Note{Actor: long("a"), Tenant: long("t"), Correlation: long("c"), Reason: long("r")}
	for i := range 64 {
		cmd.Charges = append(cmd.Charges, budget.Charge{Scope: long(fmt.Sprint(i)), Amount: 100, Note: note})
	}
	_, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, &jobs.Options{Key: long("k"), Tenant: long("t")})
		return nil, err
	})
	require.NoError(t, err)
	n, ok := next()
	require.True(t, ok)
	require.Equal(t, metered.CommandNotice{Tenant: long("tenant"), ID: long("id"), Name: long("name"), Cut: true,
		Charges: []budget.Charge{}, Jobs: []jobs.Enqueued{}}, n)
	rest, err := c.Lookup(t.Context(), pool, n.Tenant, n.ID)
	require.NoError(t, err)
	require.Len(t, rest.Receipt.Entries, 64)

	seen := map[bool]int{}
	for width := 1; width <= 200; width += 3 { // over the edge, a few bytes at a time
		var made []jobs.Enqueued
		_, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint(width), Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			made = nil
			for i := range 30 {
				key := fmt.Sprintf("%d/%0*d", i, width, width)
				r, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, &jobs.Options{Key: key})
				if err != nil {
					return nil, err
				}
				made = append(made, jobs.Enqueued{ID: r.JobID, Queue: "default", Kind: "process", Key: key})
			}
			return nil, nil
		})
		require.NoError(t, err)
		n, ok := next()
		require.True(t, ok)
		require.Equal(t, len(n.Jobs) < 30, n.Cut)
		require.Equal(t, made[:len(n.Jobs)], n.Jobs)
		seen[n.Cut]++
	}
	require.Greater(t, seen[true], 10)
	require.Greater(t, seen[false], 10)
}

// A character that takes three bytes in the database's encoding and two in UTF-8.
func TestListen_ANoticeFitsInEveryEncoding(t *testing.T) {
	t.Parallel()
	base := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	name := base.Config().ConnConfig.Database + "_euc"
	pgtest.Execute(t, base, fmt.Sprintf(`create database %q encoding 'EUC_JP' locale 'C' template template0`, name))
	t.Cleanup(func() { _, _ = base.Exec(context.Background(), fmt.Sprintf(`drop database %q with (force)`, name)) })
	config := base.Config()
	config.ConnConfig.Database = name
	config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	pgtest.Migrate(t, pool, metered.MigrateOptions{River: true})
	c := pgtest.NewClient(t, pool, metered.Config{NotifyJobs: true, NotifyChargesFrom: 100, Holds: holds.Config{NotifyContent: true}})
	next := hearing(t, pool, c)
	text := strings.Repeat("ë", 83) // 249 bytes there
	cmd := metered.Command{ID: text, Input: 1, Tenant: text, Name: text}
	for i := range 64 {
		cmd.Charges = append(cmd.Charges, budget.Charge{Scope: fmt.Sprint(text, i), Amount: 100})
	}
	_, err = metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) {
		lines := make([]holds.Line, 64)
		for i := range lines {
			lines[i] = holds.Line{Scope: fmt.Sprint(text, i), Amount: 1}
		}
		_, err := tx.Place(ctx, holds.Placement{ID: text, Tenant: text, Holder: text, TTL: time.Minute, Lines: lines, Note: budget.Note{Reason: text}}, nil)
		return nil, err
	})
	require.NoError(t, err)
	n, ok := next()
	require.True(t, ok)
	require.Equal(t, text, n.Name)
	require.True(t, n.Cut)
	require.Greater(t, len(n.Charges), 15)
}

func TestNotify_CostsNoRoundTrip(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, _ := pgtest.SetUp(t, metered.Config{})
	trips := func(cfg metered.Config, fn metered.Func[any]) int {
		pool, w := pgtest.Tap(t, owner, func(config *pgxpool.Config) { config.MaxConns = 1 })
		c := pgtest.NewClient(t, pool, cfg)
		sent := 0
		for range 4 { // the first ones are prepared, and River notifies once
			cmd := metered.Command{ID: metered.NewID(), Input: 1, Charges: []budget.Charge{pgtest.Charge("a", 100, 0)}}
			w.Each(nil)
			_, err := metered.Do(t.Context(), c, cmd, fn)
			require.NoError(t, err)
			sent = len(w.Sent())
		}
		return sent
	}
	enqueue := func(ctx context.Context, tx *metered.Tx) (any, error) {
		return tx.Enqueue(ctx, pgtest.Process{Name: "a"}, nil)
	}
	place := func(ctx context.Context, tx *metered.Tx) (any, error) {
		return tx.Place(ctx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}}, nil)
	}
	told := metered.Config{NotifyJobs: true, NotifyChargesFrom: 100, Holds: holds.Config{NotifyContent: true}}
	for fn, want := range map[string]int{"charge": 2, "enqueue": 3, "place": 2} {
		f := map[string]metered.Func[any]{"charge": func(context.Context, *metered.Tx) (any, error) { return nil, nil }, "enqueue": enqueue, "place": place}[fn]
		require.Equal(t, want, trips(metered.Config{}, f), fn)
		require.Equal(t, want, trips(told, f), fn)
	}
}

func TestNotify_RefusesANoticeThatNobodyCouldHear(t *testing.T) {
	t.Parallel()
	pool := pgtest.Nowhere(t)
	for field, cfg := range map[string]metered.Config{
		"Config.NotifyChargesFrom": {NotifyChargesFrom: -1},
		"Config.NotifyJobs":        {Config: budget.Config{Schema: strings.Repeat("s", 55)}, NotifyJobs: true},
	} {
		_, err := metered.New(pool, cfg)
		pgtest.RequireField(t, err, field, "")
	}
	c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: strings.Repeat("s", 55)}})
	require.NoError(t, err)
	none := func(context.Context, metered.CommandNotice) error { return nil }
	pgtest.RequireField(t, c.Listen(t.Context(), pool, holds.ListenOptions{}, none), "client", "")
	c, err = metered.New(pool, metered.Config{})
	require.NoError(t, err)
	pgtest.RequireField(t, c.Listen(t.Context(), pool, holds.ListenOptions{Idle: 1}, none), "ListenOptions.Idle", "")
}

func TestListen_HearsOfJobsInRiversOwnSchema(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, `create schema "RiverJobs"`)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: "RiverJobs"})
	require.NoError(t, err)
	_, err = migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(t, err)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: "RiverJobs", Plugins: []rivertype.Plugin{jobs.Plugin()}})
	require.NoError(t, err)
	c, err := metered.New(pool, metered.Config{River: client, NotifyJobs: true, NotifyChargesFrom: 100})
	require.NoError(t, err)
	next := hearing(t, pool, c)
	out, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		r, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, nil)
		return r.JobID, err
	})
	require.NoError(t, err)
	n, _ := next()
	require.Equal(t, []jobs.Enqueued{{ID: out.Result, Queue: "default", Kind: "process"}}, n.Jobs)
}

func TestListen_AnUnreadableNoticeIsACommandMissed(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	next := hearing(t, pool, c)
	for _, payload := range []string{"", "x", "null", "[1]", `{}`, `{"id":7}`, `{"missed":true,"id":"a"}`, `{"id":"a","jobs":[7]}`} {
		_, err := pool.Exec(t.Context(), `select pg_notify('metered_commands', $1)`, payload)
		require.NoError(t, err)
		n, ok := next()
		require.True(t, ok)
		require.Equal(t, metered.CommandNotice{Missed: true}, n, payload)
	}
}

func TestNotice_ReadsBackFromItsJSON(t *testing.T) {
	t.Parallel()
	n := metered.CommandNotice{Tenant: "n", ID: "i", Name: "x", Charges: []budget.Charge{{Scope: "s", Amount: 1}},
		Jobs: []jobs.Enqueued{{ID: 1, Queue: "q", Kind: "k"}}}
	b, err := json.Marshal(n)
	require.NoError(t, err)
	require.JSONEq(t, `{"tenant":"n","id":"i","name":"x","charges":[{"scope":"s","amount":1}],"jobs":[{"id":1,"queue":"q","kind":"k"}]}`, string(b))
}
