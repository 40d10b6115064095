package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/purge"
)

// untouchable is a transaction that must not be used: any use is a nil dereference.
type untouchable struct{ pgx.Tx }

var (
	long     = strings.Repeat("a", 256)
	badTexts = []string{long, strings.Repeat("a", 254) + "é", "a\xff", "a\x00b"}
	line     = holds.Line{Scope: "a", Amount: 1}
)

func requireArgument(t *testing.T, err error, field string) {
	t.Helper()
	require.ErrorIs(t, err, budget.ErrArgument, field)
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument, field)
	require.Equal(t, field, argument.Field)
	require.NotEmpty(t, argument.Reason)
	require.Equal(t, "invalid_argument", argument.Code())
}

// call is one of a book with an argument that is wrong.
type call struct {
	field string
	run   func(ctx context.Context, b *holds.Book, tx pgx.Tx) error
}

func placeCall(field string, change func(r *holds.Request)) call {
	return call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
		r := holds.Request{Lines: []holds.Line{line}, TTL: time.Minute}
		change(&r)
		_, err := b.Place(ctx, tx, r)
		if _, prepared := placeHold(b, r); fmt.Sprint(prepared) != fmt.Sprint(err) {
			return fmt.Errorf("prepared: %w", prepared)
		}
		return err
	}}
}

func claimCall(field string, change func(c *holds.Claim)) call {
	return call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
		c := holds.Claim{Key: holds.Key{Type: "t", Value: "v"}, Holder: "ann", TTL: time.Minute}
		change(&c)
		_, err := b.Claim(ctx, tx, c)
		return err
	}}
}

func captureCall(field string, change func(c *holds.Capture)) call {
	return call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
		c := holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{line}}
		change(&c)
		_, err := b.Capture(ctx, tx, c)
		return err
	}}
}

// named are the calls on holds by id, which refuse the same things.
func named(field string, tenant, holder string, ids []string, note budget.Note) (all []call) {
	noteField := map[bool]string{true: "Capture." + field, false: field}
	return []call{
		{noteField[strings.HasPrefix(field, "Note")], func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, err := b.Capture(ctx, tx, holds.Capture{Tenant: tenant, Holder: holder, IDs: ids, All: true, Note: note})
			return err
		}},
		{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, err := b.Release(ctx, tx, holds.Release{Tenant: tenant, Holder: holder, IDs: ids, Note: note})
			return err
		}},
		{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, err := b.Extend(ctx, tx, holds.Extend{Tenant: tenant, Holder: holder, IDs: ids, Note: note, By: time.Second})
			return err
		}},
		{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, err := b.Return(ctx, tx, holds.Return{Tenant: tenant, Holder: holder, IDs: ids, Note: note, All: true})
			return err
		}},
	}
}

func badTextCalls() (table []call) {
	for _, text := range badTexts {
		read := func(field string, fn func(ctx context.Context, b *holds.Book, db budget.Querier) error) call {
			return call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error { return fn(ctx, b, tx) }}
		}
		one := []string{"h"}
		notes := map[string]budget.Note{"Actor": {Actor: text}, "Tenant": {Tenant: text}, "Correlation": {Correlation: text}, "Reason": {Reason: text}}
		table = append(table,
			placeCall("ID", func(r *holds.Request) { r.ID = text }),
			placeCall("Tenant", func(r *holds.Request) { r.Tenant = text }),
			placeCall("Holder", func(r *holds.Request) { r.Holder = text }),
			placeCall("Request.Lines[0].Scope", func(r *holds.Request) { r.Lines[0].Scope = text }),
			placeCall("Request.Charges[0].Scope", func(r *holds.Request) { r.Charges = []budget.Charge{{Scope: text, Amount: 1}} }),
			claimCall("Tenant", func(c *holds.Claim) { c.Tenant = text }),
			claimCall("Holder", func(c *holds.Claim) { c.Holder = text }),
			claimCall("Key.Type", func(c *holds.Claim) { c.Key.Type = text }),
			claimCall("Key.Value", func(c *holds.Claim) { c.Key.Value = text }),
			captureCall("Capture.Entity", func(c *holds.Capture) { c.Entity = text }),
			captureCall("Capture.Lines[0].Scope", func(c *holds.Capture) { c.Lines[0].Scope = text }),
		)
		table = append(table, named("Tenant", text, "", one, budget.Note{})...)
		table = append(table, named("Holder", "", text, one, budget.Note{})...)
		table = append(table, named("ID", "", "", []string{"h", text}, budget.Note{})...)
		for field, note := range notes {
			table = append(table, named("Note."+field, "", "", one, note)...)
			table = append(table, placeCall("Request.Note."+field, func(r *holds.Request) { r.Note = note }),
				call{"Expire.Note." + field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
					_, _, err := b.Expire(ctx, tx, holds.Expire{ID: "h", Deadline: noon, Note: note})
					return err
				}})
		}
		for i, field := range []string{"Tenant", "ID", "Holder"} {
			args := [3]string{"", "h", ""}
			args[i] = text
			table = append(table,
				read(field, func(ctx context.Context, b *holds.Book, db budget.Querier) error {
					_, err := b.Get(ctx, db, args[0], args[1], args[2])
					return err
				}),
				read(field, func(ctx context.Context, b *holds.Book, db budget.Querier) error {
					_, err := b.History(ctx, db, args[0], args[1], args[2])
					return err
				}))
			if field != "Holder" {
				table = append(table, call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
					_, _, err := b.Expire(ctx, tx, holds.Expire{Tenant: args[0], ID: args[1], Deadline: noon})
					return err
				}})
			}
		}
		for field, filter := range map[string]holds.Filter{
			"Tenant": {Tenant: text}, "Holder": {Holder: text}, "Filter.Entity": {Entity: text}, "Filter.Scope": {Scope: text},
		} {
			table = append(table, read(field, func(ctx context.Context, b *holds.Book, db budget.Querier) error {
				_, err := b.List(ctx, db, filter)
				return err
			}))
		}
		table = append(table,
			read("Tenant", func(ctx context.Context, b *holds.Book, db budget.Querier) error {
				_, err := b.Claimed(ctx, db, text, holds.Key{Type: "t", Value: "v"})
				return err
			}),
			read("keys[0].Value", func(ctx context.Context, b *holds.Book, db budget.Querier) error {
				_, err := b.Claimed(ctx, db, "", holds.Key{Type: "t", Value: text})
				return err
			}))
	}
	return table
}

func TestCalls_RefuseWrongArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	b, err := holds.New(ledger, holds.Config{Subscribers: []holds.Subscriber{func(context.Context, pgx.Tx, holds.Transition) error { return nil }}})
	require.NoError(t, err)
	for i, c := range append(badTextCalls(), wrongCalls()...) {
		require.NotPanics(t, func() { requireArgument(t, c.run(t.Context(), b, untouchable{}), c.field) }, "%d: %s", i, c.field)
	}
}

func TestPlace_SaysWhetherATTLIsTooShortOrTooLong(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	for _, cfg := range []holds.Config{{}, {MinTTL: time.Millisecond, MaxTTL: bounds.MaxLifetime}} {
		b, err := holds.New(ledger, cfg)
		require.NoError(t, err)
		lo, hi := time.Second, time.Hour
		if cfg.MinTTL > 0 {
			lo, hi = cfg.MinTTL, cfg.MaxTTL
		}
		for ttl, within := range map[time.Duration]bool{
			-1: false, 0: false, lo - time.Microsecond: false, hi + time.Microsecond: false, 1<<63 - 1: false, -1 << 63: false, lo: true, hi: true,
		} {
			_, err := placeHold(b, holds.Request{Lines: []holds.Line{line}, TTL: ttl})
			_, claimErr := claimHold(b, holds.Claim{Holder: "ann", Key: holds.Key{Type: "t", Value: "v"}, TTL: ttl})
			require.Equal(t, err, claimErr)
			if within {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, budget.ErrArgument)
			var argument *budget.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.Equal(t, "Request.TTL", argument.Field)
			require.Equal(t, fmt.Sprintf("%v is not from Config.MinTTL, %v, to Config.MaxTTL, %v", ttl, lo, hi), argument.Reason)
		}
	}
}

// Arguments just within the bounds are taken, by the database too.
func TestPlace_TakesArgumentsJustWithinBounds(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: bounds.MaxLifetime, Notify: true})
	text := func(c string) string { return strings.Repeat(c, bounds.MaxIDBytes) }
	deep := strings.Repeat("[", 9999) + strings.Repeat("]", 9999)
	for name, metadata := range map[string]string{
		"long": `"` + strings.Repeat("a", bounds.MaxMetadataBytes-2) + `"`, "deep": deep, "null": "null", "spaces": ` { "a" : 1.50 } `,
		"escapes": `"\u0000 \ud800 \\ \u2028"`, "number": "1e999999",
	} {
		note := budget.Note{Actor: text("\x01"), Tenant: text("\\"), Correlation: text(`"`), Reason: text("'")}
		r := holds.Request{ID: name + text("\x1f")[len(name):], Tenant: text("\x1f"), Holder: text("\x1f"), TTL: bounds.MaxLifetime,
			Grace: bounds.MaxLifetime, Note: note, Metadata: json.RawMessage(metadata)}
		for i := range bounds.MaxScopes {
			r.Lines = append(r.Lines, capacity(fmt.Sprintf("%s/%d", name, i), bounds.MaxAmount, bounds.MaxLimit))
		}
		placed, err := f.place(r)
		require.NoError(t, err, name)
		got, err := f.book.Get(t.Context(), f.pool, r.Tenant, r.ID, r.Holder)
		require.NoError(t, err, name)
		placed.Created = false
		require.Equal(t, string(placed.Metadata), string(got.Metadata), name)
		require.True(t, reflect.DeepEqual(placed, got), name)
		hs, err := f.capture(holds.Capture{Tenant: r.Tenant, IDs: []string{r.ID}, All: true, Holder: r.Holder, Entity: text("\x1f"), Note: note})
		require.NoError(t, err, name)
		require.Equal(t, text("\x1f"), hs[0].Entity)
		history, err := f.book.History(t.Context(), f.pool, r.Tenant, r.ID, "")
		require.NoError(t, err)
		require.Equal(t, note, history[1].Note)
	}
}

// A call that was prepared is sent later, and its caller may have used its slices again.
func TestPrepare_KeepsNothingOfTheCallersSlices(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	send := func(p *holdsCall, err error) func(raising bool) ([]holds.Hold, error) {
		require.NoError(t, err)
		return func(raising bool) ([]holds.Hold, error) {
			return p.Scan(f.pool.QueryRow(t.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 1000, Raising: raising})...))
		}
	}
	metadata := json.RawMessage(`{"a": 1}`)
	lines := []holds.Line{capacity("s", 5, 9)}
	charges := []budget.Charge{{Scope: "fee", Amount: 1, Limits: []budget.Limit{budget.Lifetime(9)}}}
	place := send(placeHold(f.book, holds.Request{ID: "h", TTL: time.Minute, Lines: lines, Charges: charges, Metadata: metadata}))
	copy(metadata, `{"b": 2}`)
	lines[0].Limits[0].Max, charges[0].Limits[0].Max = 0, 0
	lines[0], charges[0] = capacity("other", 1, 1), budget.Charge{Scope: "other", Amount: 1}
	hs, err := place(false)
	require.NoError(t, err)
	require.Equal(t, `{"a": 1}`, string(hs[0].Metadata))
	require.Equal(t, []holds.HeldLine{{Scope: "s", Amount: 5, Open: 5}}, hs[0].Lines)
	require.Equal(t, "fee", hs[0].Charges[0].Scope)

	lines = []holds.Line{capacity("s", 6, 5)}
	ids := []string{"h"}
	refused := send(captureHolds(f.book, holds.Capture{IDs: ids, Over: holds.OverIfFits, Lines: lines}))
	lines[0].Limits[0].Max = 90
	lines[0] = holds.Line{Scope: "other"}
	ids[0] = "other"
	for _, raising := range []bool{false, true} {
		_, err := refused(raising)
		var e *budget.ExceededError
		require.ErrorAs(t, err, &e)
		require.Equal(t, "s", e.Refusals[0].Scope)
		require.Equal(t, int64(5), e.Refusals[0].Limit.Max)
	}

	for _, prepare := range []func(ids []string) (*holdsCall, error){
		func(ids []string) (*holdsCall, error) {
			return extendHolds(f.book, holds.Extend{IDs: ids, By: time.Second})
		},
		func(ids []string) (*holdsCall, error) {
			return captureHolds(f.book, holds.Capture{IDs: ids, All: true})
		},
		func(ids []string) (*holdsCall, error) {
			return returnHolds(f.book, holds.Return{IDs: ids, All: true})
		},
		func(ids []string) (*holdsCall, error) { return releaseHolds(f.book, holds.Release{IDs: ids}) },
	} {
		ids := []string{"h"}
		p, err := prepare(ids)
		ids[0] = "other"
		require.Equal(t, []string{"h"}, p.Locks.Holds.IDs)
		_, err = send(p, err)(false)
		require.NotErrorIs(t, err, holds.ErrUnknown)
	}
	f.verify()
}

func limited(limits ...budget.Limit) []holds.Line {
	return []holds.Line{{Scope: "a", Amount: 1, Limits: limits}}
}

// tooMany are one more than there may be, of different scopes or ids.
func tooMany[T any](n int, of func(name string) T) (all []T) {
	for i := range n + 1 {
		all = append(all, of(fmt.Sprint(i)))
	}
	return all
}

// wrongCalls are everything that is wrong with an argument but its text.
func wrongCalls() []call {
	name := func(name string) string { return name }
	table := []call{
		placeCall("Request.Lines", func(r *holds.Request) { r.Lines = nil }),
		placeCall("Request.Lines", func(r *holds.Request) { r.Lines, r.Charges = nil, []budget.Charge{{Scope: "a", Amount: 1}} }),
		placeCall("Request.Lines", func(r *holds.Request) {
			r.Lines = tooMany(bounds.MaxScopes, func(n string) holds.Line { return holds.Line{Scope: n, Amount: 1} })
		}),
		placeCall("Request.Lines[0].Scope", func(r *holds.Request) { r.Lines[0].Scope = "" }),
		placeCall("Request.Lines[0].Amount", func(r *holds.Request) { r.Lines[0].Amount = 0 }),
		placeCall("Request.Lines[1].Amount", func(r *holds.Request) { r.Lines = []holds.Line{line, {Scope: "b", Amount: -1}} }),
		placeCall("Request.Lines[0].Amount", func(r *holds.Request) { r.Lines[0].Amount = bounds.MaxAmount + 1 }),
		placeCall("Request.Lines[1].Amount", func(r *holds.Request) { r.Lines = []holds.Line{line, {Scope: "a", Amount: bounds.MaxAmount}} }),
		placeCall("Request.Lines[0].Limits[0].Max", func(r *holds.Request) { r.Lines = limited(budget.Lifetime(-1)) }),
		placeCall("Request.Lines[0].Limits[0].Max", func(r *holds.Request) { r.Lines = limited(budget.Lifetime(bounds.MaxLimit + 1)) }),
		placeCall("Request.Lines[0].Limits[1].Window", func(r *holds.Request) { r.Lines = limited(budget.Prepaid(0), budget.Limit{Window: -1}) }),
		placeCall("Request.Lines[0].Limits[0].Window", func(r *holds.Request) { r.Lines = limited(budget.Limit{Window: bounds.MaxWindow + time.Microsecond}) }),
		placeCall("Request.Lines[0].Limits[0].Window", func(r *holds.Request) { r.Lines = limited(budget.Limit{Window: 1500}) }),
		placeCall("Request.Lines[0].Limits", func(r *holds.Request) { r.Lines = limited(make([]budget.Limit, bounds.MaxLimits+1)...) }),
		placeCall("Request.Charges[0].Amount", func(r *holds.Request) { r.Charges = []budget.Charge{{Scope: "b"}} }),
		placeCall("Request.Charges[1].Note.Actor", func(r *holds.Request) {
			r.Charges = []budget.Charge{{Scope: "b", Amount: 1}, {Scope: "c", Amount: 1, Note: budget.Note{Actor: long}}}
		}),
		placeCall("Request.Grace", func(r *holds.Request) { r.Grace = -1 }),
		placeCall("Request.Grace", func(r *holds.Request) { r.Grace = time.Hour + time.Microsecond }),
		placeCall("Request.TTL", func(r *holds.Request) { r.TTL++ }),
		placeCall("Request.TTL", func(r *holds.Request) { r.Grace = 1 }),
		placeCall("Request.TTL", func(r *holds.Request) { r.TTL, r.Grace = r.TTL+500, 500 }),
		placeCall("Request.Metadata", func(r *holds.Request) { r.Metadata = json.RawMessage("{") }),
		placeCall("Request.Metadata", func(r *holds.Request) { r.Metadata = json.RawMessage("1 2") }),
		placeCall("Request.Metadata", func(r *holds.Request) { r.Metadata = json.RawMessage("\"\xff\"") }),
		placeCall("Request.Metadata", func(r *holds.Request) {
			r.Metadata = json.RawMessage(`"` + strings.Repeat("a", bounds.MaxMetadataBytes-1) + `"`)
		}),
		claimCall("Claim.Holder", func(c *holds.Claim) { c.Holder = "" }),
		claimCall("Key.Type", func(c *holds.Claim) { c.Key.Type = "" }),
		claimCall("Key.Value", func(c *holds.Claim) { c.Key.Value = "" }),
		claimCall("Key.Value", func(c *holds.Claim) { c.Key.Type, c.Key.Value = strings.Repeat("a", 120), strings.Repeat("b", 130) }),
		claimCall("Claim.Lines[0].Amount", func(c *holds.Claim) { c.Lines = []holds.Line{{Scope: "x"}} }),
		claimCall("Claim.Lines[1].Scope", func(c *holds.Claim) {
			c.Lines = []holds.Line{line, {Scope: budget.ScopeKey("claim", budget.ScopeKey("t", "v", ""), ""), Amount: 1}}
		}),
		captureCall("Capture.Over", func(c *holds.Capture) { c.Over = "fits" }),
		captureCall("Capture.Over", func(c *holds.Capture) { c.Lines, c.All, c.Over = nil, true, holds.OverAllowed }),
		captureCall("Capture.Keep", func(c *holds.Capture) { c.Lines, c.All, c.Keep = nil, true, true }),
		captureCall("Capture.Lines", func(c *holds.Capture) { c.Lines = nil }),
		captureCall("Capture.Lines", func(c *holds.Capture) { c.Lines = []holds.Line{} }),
		captureCall("Capture.Lines", func(c *holds.Capture) { c.All = true }),
		captureCall("Capture.Lines", func(c *holds.Capture) { c.IDs = []string{"h", "i"} }),
		captureCall("Capture.Lines[1].Scope", func(c *holds.Capture) { c.Lines = []holds.Line{line, line} }),
		captureCall("Capture.Lines[0].Scope", func(c *holds.Capture) { c.Lines[0].Scope = "" }),
		captureCall("Capture.Lines[0].Amount", func(c *holds.Capture) { c.Lines[0].Amount = -1 }),
		captureCall("Capture.Lines[0].Amount", func(c *holds.Capture) { c.Lines[0].Amount = bounds.MaxAmount + 1 }),
		captureCall("Capture.Lines[0].Limits[0].Max", func(c *holds.Capture) { c.Lines = limited(budget.Lifetime(-1)) }),
	}
	for field, ids := range map[string][]string{"IDs": nil, "ID": {""}, "IDs[1]": {"h", "h"}} {
		table = append(table, named(field, "", "", ids, budget.Note{})...)
	}
	table = append(table, named("IDs", "", "", tooMany(bounds.MaxHolds, name), budget.Note{})...)
	for _, by := range []time.Duration{0, -time.Second, 1, 999, time.Second + 1, bounds.MaxLifetime + time.Microsecond} {
		table = append(table, call{"Extend.By", func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, err := b.Extend(ctx, tx, holds.Extend{IDs: []string{"h"}, By: by})
			return err
		}})
	}
	for field, e := range map[string]holds.Expire{"ID": {Deadline: noon}, "Expire.Deadline": {ID: "h"}} {
		table = append(table, call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
			_, _, err := b.Expire(ctx, tx, e)
			return err
		}})
	}
	for field, filters := range map[string][]holds.Filter{
		"Filter.State": {{State: "h"}, {State: "ended"}}, "Filter.Max": {{Max: -1}, {Max: bounds.MaxPage + 1}}, "Filter.After": {{After: "-1"}, {After: "0"}, {After: "01"}, {After: "x"}, {After: "1.2"}, {After: "9223372036854775808"}},
	} {
		for _, f := range filters {
			table = append(table, call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error { _, err := b.List(ctx, tx, f); return err }})
		}
	}
	for field, opts := range map[string][]holds.SweepOptions{
		"SweepOptions.Batch": {{Batch: -1}, {Batch: bounds.MaxSweepBatch + 1}}, "SweepOptions.Max": {{Max: -1}},
	} {
		for _, o := range opts {
			table = append(table, call{field, func(ctx context.Context, b *holds.Book, _ pgx.Tx) error {
				_, err := b.Sweep(ctx, new(pgxpool.Pool), o)
				return err
			}})
		}
	}
	for field, opts := range map[string][]holds.PurgeOptions{
		"PurgeOptions.OlderThan": {{OlderThan: -1}, {OlderThan: purge.MinOlderThan - 1}, {OlderThan: purge.MaxOlderThan + 1}},
		"PurgeOptions.Batch":     {{Batch: -1}, {Batch: purge.MaxBatch + 1}},
	} {
		for _, o := range opts {
			table = append(table, call{field, func(ctx context.Context, b *holds.Book, _ pgx.Tx) error {
				_, err := b.Purge(ctx, new(pgxpool.Pool), o)
				return err
			}})
		}
	}
	return append(table,
		captureCall("Capture.Lines[0].Limits", func(c *holds.Capture) { c.Over = holds.OverIfFits }),
		captureCall("Capture.Lines[1].Limits", func(c *holds.Capture) {
			c.Over, c.Lines = holds.OverIfFits, []holds.Line{capacity("a", 1, 1), {Scope: "b", Amount: 0}}
		}),
	)
}

func TestNew_RefusesWrongConfig(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	ok := func(context.Context, pgx.Tx, holds.Transition) error { return nil }
	for field, cfgs := range map[string][]holds.Config{
		"Config.MinTTL":         {{MinTTL: -1}, {MinTTL: time.Millisecond - 1}, {MinTTL: 2 * time.Second, MaxTTL: time.Second}, {MaxTTL: -1}},
		"Config.MaxTTL":         {{MaxTTL: 2 * time.Hour, MaxLifetime: time.Hour}, {NoCeiling: true, MaxTTL: bounds.MaxLifetime + 1}},
		"Config.MaxLifetime":    {{MaxLifetime: -1}, {MaxLifetime: bounds.MaxLifetime + 1}, {MaxTTL: bounds.MaxLifetime + 1}, {NoCeiling: true, MaxLifetime: time.Hour}},
		"Config.Subscribers[1]": {{Subscribers: []holds.Subscriber{ok, nil}}},
	} {
		for _, cfg := range cfgs {
			_, err := holds.New(ledger, cfg)
			requireArgument(t, err, field)
		}
	}
	// A channel's name is as long as Postgres lets it be.
	ledger, err = budget.New(budget.Config{Schema: strings.Repeat("m", 63)})
	require.NoError(t, err)
	_, err = holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	_, err = holds.New(ledger, holds.Config{Notify: true})
	requireArgument(t, err, "Config.Notify")
}

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	tx, pool := untouchable{}, new(pgxpool.Pool)
	request := holds.Request{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}
	claim := holds.Claim{Key: holds.Key{Type: "seat", Value: "a"}, Holder: "ann", TTL: time.Minute}
	capture, release := holds.Capture{IDs: []string{"a"}, All: true}, holds.Release{IDs: []string{"a"}}
	extend, giveBack := holds.Extend{IDs: []string{"a"}, By: time.Minute}, holds.Return{IDs: []string{"a"}, All: true}
	handle := func(context.Context, holds.Notice) error { return nil }
	niltest.Methods(t, book, map[string][]any{
		"Place": {tx, request}, "Claim": {tx, claim}, "Capture": {tx, capture}, "Release": {tx, release}, "Extend": {tx, extend}, "Return": {tx, giveBack},
		"Expire": {tx, holds.Expire{ID: "a", Deadline: time.Unix(1, 0)}},
		"Get":    {tx, "", "a", ""}, "History": {tx, "", "a", ""}, "List": {tx, holds.Filter{}}, "Due": {tx, holds.DueFilter{}},
		"Claimed": {tx, "", claim.Key},
		"Sweep":   {pool, holds.SweepOptions{}}, "Purge": {pool, holds.PurgeOptions{}}, "Listen": {pool, holds.ListenOptions{}, handle},
		"Channel": {},
	})
	niltest.Func(t, "New", holds.New, ledger, holds.Config{})
	_, err = holds.New(new(budget.Ledger), holds.Config{})
	requireArgument(t, err, "ledger")
}
