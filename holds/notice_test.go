package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// expected is the notice that a transition should give: the hold after it, and the event in its history.
func (f *fixture) expected(h holds.Hold, kind holds.EventKind) holds.Notice {
	f.Helper()
	history, err := f.book.History(f.Context(), f.pool, h.Tenant, h.ID, "")
	require.NoError(f, err)
	e := history[h.Version-1]
	require.Equal(f, kind, e.Kind)
	return holds.Notice{Tenant: h.Tenant, ID: h.ID, Version: h.Version, Kind: kind,
		At: e.At, Claim: h.Claim, State: h.State, Holder: h.Holder, Deadline: h.Deadline, Note: e.Note, Lines: h.Lines}
}

func TestNotice_HasTheActorTheKindTheScopesAndTheReason(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{NotifyContent: true})
	execute(t, f.pool, fmt.Sprintf(`alter database %s set timezone = 'Asia/Kathmandu'`, pgx.Identifier{f.pool.Config().ConnConfig.Database}.Sanitize()))
	f.pool.Reset()
	l := startListening(t, another(t, f.pool, nil), holds.ListenOptions{})
	l.missed()
	hears := func(kind holds.EventKind, why string, holder string, hs ...holds.Hold) {
		t.Helper()
		for _, h := range hs {
			n := l.next()
			require.Equal(t, f.expected(h, kind), n)
			require.Equal(t, why, n.Note.Reason)
			require.Equal(t, holder, n.Holder)
			require.NotEmpty(t, n.Lines)
		}
	}
	because := func(why string) budget.Note {
		return budget.Note{Actor: "user:ann", Tenant: "acme", Correlation: "request/7", Reason: why}
	}
	lines := func(a, b int64) []holds.Line {
		return []holds.Line{{Scope: "gpu/" + odd, Amount: a}, {Scope: "cpu", Amount: b}}
	}
	h := f.mustPlace(holds.Placement{ID: odd, Holder: odd, Lines: lines(5, 7), Note: because("wanted"), Metadata: json.RawMessage(`{"a":"\u0000"}`)})
	hears(holds.EventPlaced, "wanted", odd, h)
	in := func(call func(tx pgx.Tx) ([]holds.Hold, error)) []holds.Hold {
		t.Helper()
		hs, err := do(f, func(_ context.Context, tx pgx.Tx) ([]holds.Hold, error) { return call(tx) })
		require.NoError(t, err)
		return hs
	}
	ctx := t.Context()
	hears(holds.EventExtended, odd, odd, in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Extend(ctx, tx, holds.Extend{IDs: []string{odd}, By: time.Second, Note: because(odd)})
	})...)
	hears(holds.EventCapturedPart, "some", odd, in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Capture(ctx, tx, holds.Capture{IDs: []string{odd}, Lines: lines(2, 0), Keep: true, Note: because("some")})
	})...)
	hears(holds.EventCaptured, "", odd, in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Capture(ctx, tx, holds.Capture{IDs: []string{odd}, All: true})
	})...)
	hears(holds.EventReturnedPart, "a bit", odd, in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{odd}, Lines: lines(1, 3)[:1], Note: because("a bit")})
	})...)
	hears(holds.EventReturned, "all", odd, in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{odd}, All: true, Note: because("all")})
	})...)

	seat, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.book.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "seat/" + odd, Value: longest("21A")[100:]}, Holder: "bob", TTL: time.Hour, Note: because("row 21")})
	})
	require.NoError(t, err)
	hears(holds.EventPlaced, "row 21", "bob", seat)

	var many []string
	for i := range 3 {
		id := fmt.Sprint("many/", i)
		many = append(many, id)
		hears(holds.EventPlaced, "", "bob", f.mustPlace(holds.Placement{ID: id, Holder: "bob", Lines: lines(1, int64(i+1))}))
	}
	hears(holds.EventReleased, "mind", "bob", in(func(tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Release(ctx, tx, holds.Release{IDs: many, Note: because("mind")})
	})...)

	swept := f.mustPlace(holds.Placement{ID: "swept", Tenant: "acme", Holder: "bob", Lines: lines(1, 2)})
	hears(holds.EventPlaced, "", "bob", swept)
	due := f.mustPlace(holds.Placement{ID: "due", Holder: "cy", TTL: 2 * time.Minute, Lines: lines(3, 4)})
	hears(holds.EventPlaced, "", "cy", due)
	f.clock.Advance(time.Minute)
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	swept, err = f.book.Get(ctx, f.pool, "acme", "swept", "")
	require.NoError(t, err)
	require.Equal(t, []holds.HeldLine{{Scope: "cpu", Amount: 2}, {Scope: "gpu/" + odd, Amount: 1}}, swept.Lines)
	n := l.next()
	require.Equal(t, f.expected(swept, holds.EventExpired), n)
	require.Equal(t, "system", n.Note.Actor)
	f.clock.Advance(time.Minute)
	hears(holds.EventExpired, "late", "cy", in(func(tx pgx.Tx) ([]holds.Hold, error) {
		h, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: "due", Deadline: due.Deadline, Note: because("late")})
		return []holds.Hold{h}, err
	})...)
}

// odd is a text with characters that mean something to JSON and SQL.
const odd = "a'b\"}]+\\u0000 \\x \n\t\x01 ü 🪑 \u2028 </script>"

// longest is a text of 255 bytes. In JSON it has 1,530.
func longest(end string) string { return strings.Repeat("\x01", 255-len(end)) + end }

// raw listens to payloads, as they are sent.
func (f *fixture) raw() func() []string {
	conn, err := f.pool.Acquire(f.Context())
	require.NoError(f, err)
	f.Cleanup(conn.Release)
	_, err = conn.Exec(f.Context(), `listen `+pgx.Identifier{f.book.Channel()}.Sanitize())
	require.NoError(f, err)
	return func() (all []string) {
		_, err := conn.Exec(f.Context(), `select 1`) // notices of earlier commits have come by then
		require.NoError(f, err)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		for {
			n, err := conn.Conn().WaitForNotification(ended)
			if err != nil {
				return all
			}
			all = append(all, n.Payload)
		}
	}
}

func TestNotice_OfManyLinesAndLongTextsIsCutToFit(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{NotifyContent: true})
	sent := f.raw()
	l := startListening(t, f.pool, holds.ListenOptions{})
	l.missed()
	place := func(r holds.Placement) (holds.Notice, holds.Hold) {
		t.Helper()
		h := f.mustPlace(r)
		payloads := sent()
		require.Len(t, payloads, 1)
		require.Less(t, len(payloads[0]), 8000)
		n := l.next()
		require.Equal(t, h.Holder, n.Holder)
		require.Equal(t, h.Deadline, n.Deadline)
		require.Equal(t, holds.Held, n.State)
		require.Equal(t, h.Lines[:len(n.Lines)], append([]holds.HeldLine{}, n.Lines...), "the first ones")
		whole := len(n.Lines) == len(h.Lines) && n.Note == r.Note
		require.Equal(t, !whole, n.Cut)
		return n, h
	}
	many := func(count, width int) (lines []holds.Line) {
		for i := range count {
			lines = append(lines, holds.Line{Scope: fmt.Sprintf("%0*d", width, i), Amount: bounds.MaxAmount})
		}
		return lines
	}
	seen := map[bool]int{}
	for width := 2; width <= 250; width += pgtest.Size(3, 1) { // over the edge, a few bytes at a time
		n, _ := place(holds.Placement{ID: fmt.Sprint(width), Lines: many(32, width)})
		seen[n.Cut]++
		require.NotEmpty(t, n.Lines)
	}
	require.Greater(t, seen[false], 20)
	require.Greater(t, seen[true], 20)
	n, h := place(holds.Placement{ID: "64 lines", Lines: many(64, 255), Note: budget.Note{Actor: "ann", Reason: "all"}})
	require.True(t, n.Cut)
	require.Equal(t, budget.Note{Actor: "ann", Reason: "all"}, n.Note)
	require.Greater(t, len(n.Lines), 20)
	require.Equal(t, h.Lines, f.get("64 lines").Lines, "where the rest is")

	everything := budget.Note{Actor: longest("a"), Tenant: longest("t"), Correlation: longest("c"), Reason: longest("r")}
	n, _ = place(holds.Placement{ID: longest("id"), Tenant: longest("t"), Holder: longest("h"), Note: everything, Lines: many(1, 1)})
	require.True(t, n.Cut)
	require.Zero(t, n.Note)
	require.Len(t, n.Lines, 1)
	history, err := f.book.History(t.Context(), f.pool, longest("t"), longest("id"), "")
	require.NoError(t, err)
	require.Equal(t, everything, history[0].Note, "where the note is")
	n, _ = place(holds.Placement{ID: longest("id"), Holder: longest("h"), Lines: []holds.Line{{Scope: longest("s"), Amount: 1}}, Note: budget.Note{Reason: longest("r")}})
	require.False(t, n.Cut, "as much as fits")

	// All ends of a hundred at once, and the 64 lines that a call by hand can place.
	ids := make([]string, bounds.MaxHolds)
	for i := range ids {
		ids[i] = fmt.Sprint("h", i)
		f.mustPlace(holds.Placement{ID: ids[i], Lines: many(64, 255)[:1+i%64]})
	}
	_, err = f.release(ids...)
	require.NoError(t, err)
	_, err = f.pool.Exec(t.Context(), `select metered.place(
		('', 'by hand', true, null, '', null, decode(repeat('00', 33), 'hex'), null, '1 min', '0', '1 hour', null, null)::metered.new_hold,
		array(select ('scope ' || repeat('x', 200) || n, null, 1, 1, '{}', null, false, null, null)::metered.new_charge from generate_series(1, 64) n),
		'1 min', 1000, (null, null, '[7, {"actor": "x"}]')::metered.origin, $1, false)`, f.book.Channel()+"+")
	require.NoError(t, err)
	payloads := sent()
	require.Len(t, payloads, 2*bounds.MaxHolds+1)
	for _, p := range payloads {
		require.Less(t, len(p), 8000)
		require.True(t, json.Valid([]byte(p)))
	}
	for range 2 * bounds.MaxHolds {
		require.False(t, l.next().Missed)
	}
	n = l.next()
	require.Equal(t, "by hand", n.ID)
	require.True(t, n.Cut)
	require.Greater(t, len(n.Lines), 25)
}

func TestNotice_WithoutContentSaysNothingOfIt(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	sent := f.raw()
	f.mustPlace(holds.Placement{ID: "h", Holder: "ann", Lines: []holds.Line{{Scope: "a", Amount: 1}}, Note: budget.Note{Actor: "ann"}})
	require.Equal(t, []string{`{"tenant" : "", "id" : "h", "version" : 1, "kind" : "placed"}`}, sent())
}

func TestNotice_OfARefundMindsNoMetadata(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{{Scope: "a", Amount: 1}}, Metadata: json.RawMessage(`{"a":"\u0000"}`)})
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, "h"))
	require.NoError(t, err)
}

// listen returns the notices since, without waiting for more.
func listen(t *testing.T, f *fixture) func() []string {
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	var got []string
	raw := conn.Conn().PgConn()
	_, err = conn.Exec(t.Context(), `listen `+pgx.Identifier{f.book.Channel()}.Sanitize())
	require.NoError(t, err)
	return func() []string {
		execute(t, f.pool, `select pg_notify($1, 'end')`, f.book.Channel())
		for !slices.Contains(got, "end") {
			require.NoError(t, raw.WaitForNotification(t.Context()))
			n := drain(conn.Conn())
			got = append(got, n...)
		}
		all := got[:len(got)-1]
		got = nil
		return all
	}
}

func drain(conn *pgx.Conn) (payloads []string) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for {
		n, err := conn.WaitForNotification(ctx) // the notices that have arrived, and no more
		if err != nil {
			return payloads
		}
		payloads = append(payloads, payload(n))
	}
}

func payload(n *pgconn.Notification) string {
	var p struct {
		Tenant, ID, Kind string
		Version          int
	}
	if json.Unmarshal([]byte(n.Payload), &p) != nil {
		return n.Payload
	}
	return fmt.Sprint(p.Tenant, p.Kind, " ", p.ID, " ", p.Version)
}

func TestNotify_ArrivesWithTheCommitAndNeverAfterARollback(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]holds.Config{"plain": {Notify: true}, "with content": {NotifyContent: true}, "both": {Notify: true, NotifyContent: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			arrivesWithTheCommit(t, cfg)
		})
	}
}

func arrivesWithTheCommit(t *testing.T, cfg holds.Config) {
	f, w := subscribed(t, cfg)
	heard := listen(t, f)
	ctx := t.Context()
	place := func(tx pgx.Tx, id string) error {
		_, err := f.book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 9)}})
		return err
	}
	tx := begin(t, f.pool, pgx.ReadCommitted)
	require.NoError(t, place(tx, "h1"))
	w.veto["h2"] = true
	require.ErrorIs(t, place(tx, "h2"), errVeto)
	sub, err := tx.Begin(ctx)
	require.NoError(t, err)
	require.NoError(t, place(sub, "h3"))
	require.NoError(t, sub.Rollback(ctx))
	require.Empty(t, heard(), "not before the commit")
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, []string{"placed h1 1"}, heard())

	tx = begin(t, f.pool, pgx.ReadCommitted)
	_, err = f.book.Release(ctx, tx, holds.Release{IDs: []string{"h1"}})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	require.Empty(t, heard())

	f.mustPlace(holds.Placement{ID: "h4", Lines: []holds.Line{capacity("b", 1, 1)}})
	_, err = f.extend(time.Second, "h1")
	require.NoError(t, err)
	require.Equal(t, []string{"placed h4 1", "extended h1 2"}, heard())
	f.clock.Advance(time.Hour)
	f.mustPlace(holds.Placement{ID: "h5", Lines: []holds.Line{capacity("b", 1, 1)}})
	require.Equal(t, []string{"placed h5 1"}, heard(), "ended by the way: announced by the sweeper")
	w.veto["h4"] = true
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.ErrorIs(t, err, errVeto)
	require.Equal(t, []string{"expired h1 3"}, heard())
	w.veto = nil
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []string{"expired h4 2"}, heard())
	_, err = f.capture(holds.Capture{IDs: []string{"h5"}, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, "h5"))
	require.NoError(t, err)
	require.Equal(t, []string{"captured h5 2", "returned h5 3"}, heard())
}
