package holds_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/purge"
)

var errVeto = errors.New("veto")

// witness is a subscriber that writes transitions down, in the call's transaction, and refuses those of the ids in
// veto. Before it refuses it runs a statement that fails.
type witness struct{ veto map[string]bool }

func (w *witness) hear(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
	_, err := tx.Exec(ctx, `insert into heard (kind, id, version, state) values ($1, $2, $3, $4)`, t.Kind, t.Hold.ID, t.Hold.Version, t.Hold.State)
	if err != nil {
		return err
	}
	if w.veto[t.Hold.ID] {
		_, err := tx.Exec(ctx, `select 1 / 0`)
		return errors.Join(errVeto, err)
	}
	return nil
}

func (f *fixture) heard() (all []string) {
	f.Helper()
	rows, err := f.pool.Query(f.Context(), `select kind || ' ' || id || ' ' || version || ' ' || state from heard order by n`)
	require.NoError(f, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f, err)
	return all
}

func subscribed(t *testing.T, cfg holds.Config) (*fixture, *witness) {
	w := &witness{veto: map[string]bool{}}
	cfg.Subscribers = append(cfg.Subscribers, w.hear)
	f := setUp(t, cfg)
	execute(t, f.pool, `create table heard (n bigint generated always as identity, kind text, id text, version int, state text)`)
	return f, w
}

// vetoed runs a call in which a subscriber refuses the transition of id, in a transaction that commits all the same,
// and returns its error.
func (f *fixture) vetoed(w *witness, id string, call func(ctx context.Context, tx pgx.Tx) error) error {
	f.Helper()
	w.veto[id] = true
	defer delete(w.veto, id)
	before := f.dump()
	tx := begin(f, f.pool, pgx.ReadCommitted)
	_, err := tx.Exec(f.Context(), `insert into heard (kind) values (null)`)
	require.NoError(f, err)
	vetoed := call(f.Context(), tx)
	require.NoError(f, tx.Commit(f.Context()), "the transaction is as usable as it was")
	require.Equal(f, before, f.dump())
	require.Equal(f, 1, queryRow[int](f, f.pool, `select count(*) from heard where kind is null`), "the write before it stays")
	execute(f, f.pool, `delete from heard where kind is null`)
	return vetoed
}

func TestSubscriber_HearsEachTransitionOfItsOwnCallAndCanRefuseIt(t *testing.T) {
	t.Parallel()
	f, w := subscribed(t, holds.Config{})
	request := func(id string) holds.Placement {
		return holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("a", 2, 9)}}
	}
	var last holds.Hold
	expire := func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: "h3", Deadline: last.Deadline})
		return err
	}
	for _, c := range []struct {
		id   string
		kind holds.EventKind
		want []string
		call func(ctx context.Context, tx pgx.Tx) error
	}{
		{"h1", holds.EventPlaced, []string{"placed h1 1 held"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Place(ctx, tx, request("h1"))
			return err
		}},
		{"", "", nil, func(ctx context.Context, tx pgx.Tx) error { // the same again
			_, err := f.book.Place(ctx, tx, request("h1"))
			return err
		}},
		{"h2", holds.EventPlaced, []string{"placed h2 1 held"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Place(ctx, tx, request("h2"))
			return err
		}},
		{"h3", holds.EventPlaced, []string{"placed h3 1 held"}, func(ctx context.Context, tx pgx.Tx) (err error) {
			last, err = f.book.Place(ctx, tx, request("h3"))
			return err
		}},
		{"h2", holds.EventExtended, []string{"extended h1 2 held", "extended h2 2 held"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Extend(ctx, tx, holds.Extend{IDs: []string{"h1", "h2"}, By: time.Minute})
			return err
		}},
		{"h1", holds.EventCapturedPart, []string{"captured in part h1 3 held"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h1"}, Lines: []holds.Line{{Scope: "a", Amount: 1}}, Keep: true})
			return err
		}},
		{"h1", holds.EventCaptured, []string{"captured h1 4 captured"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h1"}, All: true})
			return err
		}},
		{"h1", holds.EventReturned, []string{"returned h1 5 returned"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Return(ctx, tx, holds.Return{IDs: []string{"h1"}, All: true})
			return err
		}},
		{"h4", holds.EventPlaced, []string{"placed h4 1 held"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Place(ctx, tx, request("h4"))
			return err
		}},
		{"h4", holds.EventCaptured, []string{"captured h4 2 captured"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h4"}, All: true})
			return err
		}},
		{"h4", holds.EventReturned, []string{"returned h4 3 returned"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{"h4"}, Captured: true})
			return err
		}},
		{"h2", holds.EventReleased, []string{"released h2 3 released"}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{"h2"}})
			return err
		}},
		{"h3", holds.EventExpired, []string{"expired h3 2 expired"}, func(ctx context.Context, tx pgx.Tx) error {
			f.clock.Set(last.Due)
			return expire(ctx, tx)
		}},
		{"", "", nil, expire},
	} {
		before := f.heard()
		if c.id != "" {
			err := f.vetoed(w, c.id, c.call)
			var refusal *fault.Listener
			require.ErrorAs(t, err, &refusal)
			require.ErrorContains(t, refusal, fmt.Sprintf("refused that %q is %s:", c.id, c.kind))
			require.ErrorIs(t, err, errVeto)
			require.Equal(t, "22012", code(err))
			require.Equal(t, before, f.heard())
		}
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error { return c.call(t.Context(), tx) }))
		require.Equal(t, append(before, c.want...), f.heard())
	}
	f.verify()
}

// A placement that ends another's hold does not call subscribers for it, and they cannot fail it. The sweeper announces
// it. A refused announcement stops no other, and is made again.
func TestSubscriber_OfASweepGetsHoldsThatOthersEndedUntilItAccepts(t *testing.T) {
	t.Parallel()
	f, w := subscribed(t, holds.Config{Notify: true})
	for i := range 5 {
		f.mustPlace(holds.Placement{ID: fmt.Sprint("h", i), Lines: []holds.Line{capacity(fmt.Sprint(i), 1, 1)}})
	}
	f.clock.Advance(time.Minute)
	for i := range 5 {
		w.veto[fmt.Sprint("h", i)] = true
	}
	before := f.heard()
	f.mustPlace(holds.Placement{ID: "new", TTL: time.Hour, Lines: []holds.Line{capacity("1", 1, 1)}})
	_, err := f.charge(budget.Charge{Scope: "2", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
	require.NoError(t, err)
	before = append(before, "placed new 1 held")
	require.Equal(t, before, f.heard())
	require.Equal(t, holds.Expired, f.get("h1").State)

	w.veto = map[string]bool{"h1": true, "h3": true}
	for _, batch := range []int{0, 2} {
		report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{Batch: batch})
		require.ErrorIs(t, err, errVeto)
		var refusal *fault.Listener
		require.ErrorAs(t, err, &refusal)
		require.ErrorContains(t, refusal, " is expired:")
		require.Equal(t, 2, report.Failed)
		if batch == 0 {
			require.Equal(t, 3, report.Expired)
			before = append(before, "expired h0 2 expired", "expired h2 2 expired", "expired h4 2 expired")
		} else {
			require.Zero(t, report.Expired)
		}
		require.Equal(t, before, f.heard())
		for i := range 5 { // they have ended all the same
			_, held := f.usage(fmt.Sprint(i))
			require.Equal(t, i == 1, held == 1)
			require.Equal(t, holds.Expired, f.get(fmt.Sprint("h", i)).State)
		}
		f.verify()
	}
	// A purge leaves holds that are still to be announced.
	f.clock.Advance(time.Minute)
	n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(3), n)
	w.veto = nil
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 2, report.Expired)
	before = append(before, "expired h1 2 expired", "expired h3 2 expired")
	require.Equal(t, before, f.heard())
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, report.Expired)
	require.Equal(t, before, f.heard())
}

// A subscriber that ignores the failure of a statement of its own refuses that
// transition, and no other one.
func TestSubscriber_ThatSwallowsAFailureRefusesItsOwnTransitionOnly(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Subscribers: []holds.Subscriber{func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
		if tr.Kind != holds.EventPlaced && tr.Hold.ID == "bad" {
			_, _ = tx.Exec(ctx, `select 1 / 0`)
		}
		return nil
	}}})
	for _, id := range []string{"a", "bad", "c"} {
		f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{capacity("s", 5, 99)}})
	}
	var refusal *fault.Listener
	tx := begin(t, f.pool, pgx.ReadCommitted)
	_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{"bad"}, All: true})
	require.ErrorAs(t, err, &refusal)
	require.ErrorContains(t, refusal, `"bad"`)
	_, err = f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{"a"}, All: true})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, holds.Held, f.get("bad").State)

	f.clock.Advance(time.Minute)
	for _, expired := range []int{1, 0} {
		report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
		require.ErrorAs(t, err, &refusal)
		require.ErrorContains(t, refusal, `"bad"`)
		require.Equal(t, holds.SweepReport{Expired: expired, Failed: 1, Batches: 1, ScannedAt: f.clock.Now()}, report)
	}
	f.verify()
}

// However a subscriber's end comes about, a transition that was not answered does not
// stay: also where the caller goes on and commits.
func TestSubscriber_OfACallThatEndsMeanwhileLeavesNothing(t *testing.T) {
	t.Parallel()
	var end func(ctx context.Context, tx pgx.Tx) error
	f := setUp(t, holds.Config{Subscribers: []holds.Subscriber{func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
		if end != nil {
			return end(ctx, tx)
		}
		return nil
	}}})
	last := f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 5, 5)}})
	calls := map[string]func(ctx context.Context, tx pgx.Tx) error{
		"place": func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Place(ctx, tx, holds.Placement{ID: "new", TTL: time.Minute, Lines: []holds.Line{capacity("b", 1, 1)}})
			return err
		},
		"capture": func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, All: true})
			return err
		},
		"expire": func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: "h", Deadline: last.Deadline})
			return err
		},
	}
	for _, way := range []struct {
		name string
		lost bool // the connection
		end  func(ctx context.Context, tx pgx.Tx, cancel func()) error
	}{
		{"cancelled, with an error", false, func(ctx context.Context, _ pgx.Tx, cancel func()) error {
			cancel()
			return ctx.Err()
		}},
		{"cancelled, without an error", false, func(_ context.Context, _ pgx.Tx, cancel func()) error {
			cancel()
			return nil
		}},
		{"cancelled in a panic", false, func(_ context.Context, _ pgx.Tx, cancel func()) error {
			cancel()
			panic(errVeto)
		}},
		{"rows left open", true, func(ctx context.Context, tx pgx.Tx, _ func()) error {
			_, err := tx.Query(ctx, `select generate_series(1, 9)`)
			return err
		}},
		{"the savepoint released", true, func(ctx context.Context, tx pgx.Tx, _ func()) error {
			return errors.Join(tx.Commit(ctx), errVeto)
		}},
	} {
		for name, call := range calls {
			f.clock.Set(noon)
			if name == "expire" {
				f.clock.Set(last.Due)
			}
			before := f.dump()
			tx := begin(t, f.pool, pgx.ReadCommitted)
			ctx, cancel := context.WithCancel(t.Context())
			end = func(ctx context.Context, tx pgx.Tx) error { return way.end(ctx, tx, cancel) }
			err := func() (err error) {
				defer func() {
					if cause := recover(); cause != nil {
						err = cause.(error)
					}
				}()
				return call(ctx, tx)
			}()
			end = nil
			cancel()
			require.Error(t, err, "%s, %s", way.name, name)
			require.Equal(t, way.lost, tx.Conn().IsClosed(), "%s, %s", way.name, name)
			require.Equal(t, way.lost, tx.Commit(t.Context()) != nil, "%s, %s", way.name, name)
			require.Equal(t, before, f.dump(), "%s, %s", way.name, name)
		}
	}
	f.verify()
}
