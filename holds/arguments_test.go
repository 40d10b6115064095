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
			_, err := placeHold(b, holds.Placement{Lines: []holds.Line{line}, TTL: ttl})
			_, claimErr := claimHold(b, holds.Claim{Holder: "ann", Key: holds.Key{Type: "t", Value: "v"}, TTL: ttl})
			require.Equal(t, err, claimErr)
			if within {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, budget.ErrArgument)
			var argument *budget.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.Equal(t, "Placement.TTL", argument.Field)
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
		r := holds.Placement{ID: name + text("\x1f")[len(name):], Tenant: text("\x1f"), Holder: text("\x1f"), TTL: bounds.MaxLifetime,
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
	place := send(placeHold(f.book, holds.Placement{ID: "h", TTL: time.Minute, Lines: lines, Charges: charges, Metadata: metadata}))
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
	request := holds.Placement{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute}
	claim := holds.Claim{Key: holds.Key{Type: "seat", Value: "a"}, Holder: "ann", TTL: time.Minute}
	capture, release := holds.Capture{IDs: []string{"a"}, All: true}, holds.Release{IDs: []string{"a"}}
	extend, giveBack := holds.Extend{IDs: []string{"a"}, By: time.Minute}, holds.Return{IDs: []string{"a"}, All: true}
	handle := func(context.Context, holds.Notice) error { return nil }
	niltest.Methods(t, book, map[string][]any{
		"Place": {tx, request}, "Claim": {tx, claim}, "Capture": {tx, capture}, "Release": {tx, release}, "Extend": {tx, extend}, "Return": {tx, giveBack},
		"Expire": {tx, holds.Expire{ID: "a", Deadline: time.Unix(1, 0)}},
		"Get":    {tx, "", "a", ""}, "History": {tx, "", "a", ""}, "List": {tx, holds.Filter{}}, "Due": {tx, holds.DueFilter{}},
		"Claimed": {tx, "", claim.Key},
		"Sweep":   {pool, holds.SweepOptions{}}, "Listen": {pool, holds.ListenOptions{}, handle},
		"Channel": {},
	})
	niltest.Func(t, "New", holds.New, ledger, holds.Config{})
	_, err = holds.New(new(budget.Ledger), holds.Config{})
	requireArgument(t, err, "ledger")
}
