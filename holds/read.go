package holds

import (
	"cmp"
	"context"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

const getSQL = `
select (select metered.hold_json(h.no, metered.clock()) from metered.holds h where h.tenant = $1 and h.id = $2),
    coalesce($3 <= (select z.at from metered.holds_horizon z where z.one), false)`

// Get returns a hold, of any holder if holder is empty. Errors: ErrUnknown, ErrRetired.
func (b *Book) Get(ctx context.Context, db budget.Querier, tenant, id, holder string) (Hold, error) {
	if err := cmp.Or(b.made(), notNil("db", db)); err != nil {
		return Hold{}, err
	}
	if err := checkNames(tenant, holder, id); err != nil {
		return Hold{}, err
	}
	var raw []byte
	var old bool
	if err := answer.QueryRow(ctx, db, b.sql.get, tenant, id, issuedAt(id)).Scan(&raw, &old); err != nil {
		return Hold{}, failed("get", err)
	}
	others := false
	if raw != nil {
		var h Hold
		if err := h.decode(raw); err != nil || holder == "" || h.Holder == holder {
			return h, err
		}
		others = true
	}
	if old { // for any holder: an id that old would be ErrRetired if it did not exist
		return Hold{}, ErrRetired
	}
	return Hold{}, unknown(others)
}

// Filter selects holds of one tenant. Other zero fields select all.
type Filter struct {
	// Tenant selects the holds of this tenant. "" is a tenant, too.
	Tenant string

	// Holder selects holds of this holder.
	Holder string

	// Entity selects holds that were captured for this entity.
	Entity string

	// State selects holds in this state.
	State State

	// Scope selects holds with a line on this scope.
	Scope string

	// Claim selects claims of this key, with the ended ones.
	Claim Key

	// After goes on behind the page before: its Page.Next.
	After string

	// Max is the size of a page, from 1 to 1,000. Defaults to 100.
	Max int
}

// Page is a part of a list.
type Page struct {
	// Holds are the holds of the page, in the order of the list.
	Holds []Hold `json:"holds"`

	// Next is the After of the next filter. It is "" at the end.
	Next string `json:"next,omitempty"`
}

const listFilterSQL = `
    and ($2 = '' or h.holder = $2) and ($3 = '' or h.entity = $3)
    and ($4 = '' or $4 = case when h.state = 'h' and h.due <= $8 then 'x' when h.returned then 'b' else h.state::text end)
    and ($5 = '' or (select l.hold from metered.hold_lines l where l.hold = h.no and l.scope = $5) is not null)`

const listSQL = `
select h.no, metered.hold_json(h.no, $8::timestamptz) from metered.holds h
where h.tenant = $1 and h.no < $6` + listFilterSQL + `
order by h.no desc limit $7`

// The ids of a key's claims share a prefix, by which they are found, and then sorted: "+ 0" keeps
// the planner from reading all holds in the order of their numbers.
const listClaimsSQL = `
select h.no, metered.hold_json(h.no, $8::timestamptz) from metered.holds h
where h.tenant = $1 and h.id >= $9 and h.id < $10 and h.claim = $11 and h.no < $6` + listFilterSQL + `
order by h.no + 0 desc limit $7`

// List returns holds, newest first. Holder, Entity and Claim are indexed.
func (b *Book) List(ctx context.Context, db budget.Querier, f Filter) (Page, error) {
	if err := cmp.Or(b.made(), notNil("db", db)); err != nil {
		return Page{}, err
	}
	state, claim, before, err := f.check()
	if err != nil {
		return Page{}, err
	}
	var now time.Time
	if err := answer.QueryRow(ctx, db, b.schema.SQL(`select metered.clock()`)).Scan(&now); err != nil {
		return Page{}, failed("list", err)
	}
	sql, args := b.sql.list, []any{f.Tenant, f.Holder, f.Entity, state, f.Scope, before, f.Max, now}
	if claim != "" {
		prefix := claimIDs(claim)
		sql, args = b.sql.claims, append(args, prefix, prefix+"~", claim)
	}
	rows, err := answer.Query(ctx, db, sql, args...)
	if err != nil {
		return Page{}, failed("list", err)
	}
	page := Page{}
	var no, last int64
	var raw []byte
	_, err = pgx.ForEachRow(rows, []any{&no, &raw}, func() error {
		var h Hold
		if err := h.decode(raw); err != nil {
			return err
		}
		page.Holds = append(page.Holds, h)
		last = no
		return nil
	})
	if err != nil {
		return Page{}, failed("list", err)
	}
	if len(page.Holds) == f.Max {
		page.Next = strconv.FormatInt(last, 10)
	}
	return page, nil
}

// check validates a filter and sets its defaults. It returns the state as it is stored, the scope
// of the key, and the number before which the page begins.
func (f *Filter) check() (state, claim string, before int64, err error) {
	if err := cmp.Or(checkNames(f.Tenant, f.Holder), checkText("Filter.Entity", f.Entity),
		checkText("Filter.Scope", f.Scope)); err != nil {
		return "", "", 0, err
	}
	before = math.MaxInt64
	for stored, s := range states {
		if f.State == s {
			state = stored
		}
	}
	if f.State != "" && state == "" {
		return "", "", 0, invalid("Filter.State", "%q is not a state", f.State)
	}
	if f.After != "" {
		if before, err = strconv.ParseInt(f.After, 10, 64); err != nil || before < 1 ||
			strconv.FormatInt(before, 10) != f.After {
			return "", "", 0, invalid("Filter.After", "%q is not a Page.Next of List", f.After)
		}
	}
	if f.Max, err = pageSize("Filter.Max", f.Max); err == nil && f.Claim != (Key{}) {
		claim, err = claimScope(f.Tenant, f.Claim)
	}
	return state, claim, before, err
}
