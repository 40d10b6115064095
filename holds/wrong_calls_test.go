package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
)

// call is one of a book with an argument that is wrong.
type call struct {
	field string
	run   func(ctx context.Context, b *holds.Book, tx pgx.Tx) error
}

func placeCall(field string, change func(r *holds.Placement)) call {
	return call{field, func(ctx context.Context, b *holds.Book, tx pgx.Tx) error {
		r := holds.Placement{Lines: []holds.Line{line}, TTL: time.Minute}
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
			placeCall("ID", func(r *holds.Placement) { r.ID = text }),
			placeCall("Tenant", func(r *holds.Placement) { r.Tenant = text }),
			placeCall("Holder", func(r *holds.Placement) { r.Holder = text }),
			placeCall("Placement.Lines[0].Scope", func(r *holds.Placement) { r.Lines[0].Scope = text }),
			placeCall("Placement.Charges[0].Scope", func(r *holds.Placement) { r.Charges = []budget.Charge{{Scope: text, Amount: 1}} }),
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
			table = append(table, placeCall("Placement.Note."+field, func(r *holds.Placement) { r.Note = note }),
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
		placeCall("Placement.Lines", func(r *holds.Placement) { r.Lines = nil }),
		placeCall("Placement.Lines", func(r *holds.Placement) { r.Lines, r.Charges = nil, []budget.Charge{{Scope: "a", Amount: 1}} }),
		placeCall("Placement.Lines", func(r *holds.Placement) {
			r.Lines = tooMany(bounds.MaxScopes, func(n string) holds.Line { return holds.Line{Scope: n, Amount: 1} })
		}),
		placeCall("Placement.Lines[0].Scope", func(r *holds.Placement) { r.Lines[0].Scope = "" }),
		placeCall("Placement.Lines[0].Amount", func(r *holds.Placement) { r.Lines[0].Amount = 0 }),
		placeCall("Placement.Lines[1].Amount", func(r *holds.Placement) { r.Lines = []holds.Line{line, {Scope: "b", Amount: -1}} }),
		placeCall("Placement.Lines[0].Amount", func(r *holds.Placement) { r.Lines[0].Amount = bounds.MaxAmount + 1 }),
		placeCall("Placement.Lines[1].Amount", func(r *holds.Placement) { r.Lines = []holds.Line{line, {Scope: "a", Amount: bounds.MaxAmount}} }),
		placeCall("Placement.Lines[0].Limits[0].Max", func(r *holds.Placement) { r.Lines = limited(budget.Lifetime(-1)) }),
		placeCall("Placement.Lines[0].Limits[0].Max", func(r *holds.Placement) { r.Lines = limited(budget.Lifetime(bounds.MaxLimit + 1)) }),
		placeCall("Placement.Lines[0].Limits[1].Window", func(r *holds.Placement) { r.Lines = limited(budget.Prepaid(0), budget.Limit{Window: -1}) }),
		placeCall("Placement.Lines[0].Limits[0].Window", func(r *holds.Placement) { r.Lines = limited(budget.Limit{Window: bounds.MaxWindow + time.Microsecond}) }),
		placeCall("Placement.Lines[0].Limits[0].Window", func(r *holds.Placement) { r.Lines = limited(budget.Limit{Window: 1500}) }),
		placeCall("Placement.Lines[0].Limits", func(r *holds.Placement) { r.Lines = limited(make([]budget.Limit, bounds.MaxLimits+1)...) }),
		placeCall("Placement.Lines[1].Amount", func(r *holds.Placement) {
			r.UpTo, r.Lines = true, []holds.Line{line, {Scope: "b", Amount: line.Amount + 1}}
		}),
		placeCall("Placement.Lines[1].Scope", func(r *holds.Placement) { r.UpTo, r.Lines = true, []holds.Line{line, line} }),
		placeCall("Placement.Charges[0].Amount", func(r *holds.Placement) { r.Charges = []budget.Charge{{Scope: "b"}} }),
		placeCall("Placement.Charges[1].Note.Actor", func(r *holds.Placement) {
			r.Charges = []budget.Charge{{Scope: "b", Amount: 1}, {Scope: "c", Amount: 1, Note: budget.Note{Actor: long}}}
		}),
		placeCall("Placement.Grace", func(r *holds.Placement) { r.Grace = -1 }),
		placeCall("Placement.Grace", func(r *holds.Placement) { r.Grace = time.Hour + time.Microsecond }),
		placeCall("Placement.TTL", func(r *holds.Placement) { r.TTL++ }),
		placeCall("Placement.TTL", func(r *holds.Placement) { r.Grace = 1 }),
		placeCall("Placement.TTL", func(r *holds.Placement) { r.TTL, r.Grace = r.TTL+500, 500 }),
		placeCall("Placement.Metadata", func(r *holds.Placement) { r.Metadata = json.RawMessage("{") }),
		placeCall("Placement.Metadata", func(r *holds.Placement) { r.Metadata = json.RawMessage("1 2") }),
		placeCall("Placement.Metadata", func(r *holds.Placement) { r.Metadata = json.RawMessage("\"\xff\"") }),
		placeCall("Placement.Metadata", func(r *holds.Placement) {
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
	return append(table,
		captureCall("Capture.Lines[0].Limits", func(c *holds.Capture) { c.Over = holds.OverIfFits }),
		captureCall("Capture.Lines[1].Limits", func(c *holds.Capture) {
			c.Over, c.Lines = holds.OverIfFits, []holds.Line{capacity("a", 1, 1), {Scope: "b", Amount: 0}}
		}),
	)
}
