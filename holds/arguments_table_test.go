package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/purge"
)

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
			r.Lines = tooMany(budget.MaxScopes, func(n string) holds.Line { return holds.Line{Scope: n, Amount: 1} })
		}),
		placeCall("Request.Lines[0].Scope", func(r *holds.Request) { r.Lines[0].Scope = "" }),
		placeCall("Request.Lines[0].Amount", func(r *holds.Request) { r.Lines[0].Amount = 0 }),
		placeCall("Request.Lines[1].Amount", func(r *holds.Request) { r.Lines = []holds.Line{line, {Scope: "b", Amount: -1}} }),
		placeCall("Request.Lines[0].Amount", func(r *holds.Request) { r.Lines[0].Amount = budget.MaxAmount + 1 }),
		placeCall("Request.Lines[1].Amount", func(r *holds.Request) { r.Lines = []holds.Line{line, {Scope: "a", Amount: budget.MaxAmount}} }),
		placeCall("Request.Lines[0].Limits[0].Max", func(r *holds.Request) { r.Lines = limited(budget.Lifetime(-1)) }),
		placeCall("Request.Lines[0].Limits[0].Max", func(r *holds.Request) { r.Lines = limited(budget.Lifetime(budget.MaxLimit + 1)) }),
		placeCall("Request.Lines[0].Limits[1].Window", func(r *holds.Request) { r.Lines = limited(budget.Prepaid(), budget.Limit{Window: budget.OfCredit - 1}) }),
		placeCall("Request.Lines[0].Limits[0].Window", func(r *holds.Request) { r.Lines = limited(budget.Limit{Window: budget.MaxWindow + time.Microsecond}) }),
		placeCall("Request.Lines[0].Limits[0].Window", func(r *holds.Request) { r.Lines = limited(budget.Limit{Window: 1500}) }),
		placeCall("Request.Lines[0].Limits", func(r *holds.Request) { r.Lines = limited(make([]budget.Limit, budget.MaxLimits+1)...) }),
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
			r.Metadata = json.RawMessage(`"` + strings.Repeat("a", holds.MaxMetadataBytes-1) + `"`)
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
		captureCall("Capture.Lines[0].Amount", func(c *holds.Capture) { c.Lines[0].Amount = budget.MaxAmount + 1 }),
		captureCall("Capture.Lines[0].Limits[0].Max", func(c *holds.Capture) { c.Lines = limited(budget.Lifetime(-1)) }),
	}
	for field, ids := range map[string][]string{"IDs": nil, "ID": {""}, "IDs[1]": {"h", "h"}} {
		table = append(table, named(field, "", "", ids, budget.Note{})...)
	}
	table = append(table, named("IDs", "", "", tooMany(holds.MaxHolds, name), budget.Note{})...)
	for _, by := range []time.Duration{0, -time.Second, 1, 999, time.Second + 1, holds.MaxMaxLifetime + time.Microsecond} {
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
		"Filter.State": {{State: "h"}, {State: "ended"}}, "Filter.Max": {{Max: -1}, {Max: holds.MaxPage + 1}}, "Filter.Before": {{Before: -1}},
	} {
		for _, f := range filters {
			table = append(table, call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error { _, err := b.List(ctx, tx, f); return err }})
		}
	}
	for field, opts := range map[string][]holds.SweepOptions{
		"SweepOptions.Batch": {{Batch: -1}, {Batch: holds.MaxSweepBatch + 1}}, "SweepOptions.Max": {{Max: -1}},
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
		"Config.MaxTTL":         {{MaxTTL: 2 * time.Hour, MaxLifetime: time.Hour}, {NoCeiling: true, MaxTTL: holds.MaxMaxLifetime + 1}},
		"Config.MaxLifetime":    {{MaxLifetime: -1}, {MaxLifetime: holds.MaxMaxLifetime + 1}, {MaxTTL: holds.MaxMaxLifetime + 1}, {NoCeiling: true, MaxLifetime: time.Hour}},
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
