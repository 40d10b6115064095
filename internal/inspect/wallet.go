package inspect

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/wallet"
)

// Wallet is the content of a scope whose credit is in lots.
type Wallet struct {
	wallet.Balance
	NextEnd    time.Time      `json:"next_end,omitzero"` // when the first lot of Units ends that has some left, zero if none does
	NextUnits  int64          `json:"next_units"`        // units that lapse or roll over then, unless drawn before
	Categories []CategoryRest `json:"categories"`        // by name
}

// KeptFor is the units of the lots that pay for a use, and for some uses alone.
func (w *Wallet) KeptFor(use string) (units int64) {
	for _, l := range w.Lots {
		if slices.Contains(l.Uses, use) {
			units += l.Units
		}
	}
	return units
}

// CategoryRest is the units in the lots of a category.
type CategoryRest struct {
	Category string `json:"category"`
	Units    int64  `json:"units"`
	Held     int64  `json:"held"`
}

// Ending is a lot with units left, which end.
type Ending struct {
	Wallet    string    `json:"wallet"`
	Lot       int64     `json:"lot"` // 0 if it renews another one, and no write has begun it
	Reference string    `json:"reference,omitempty"`
	Units     int64     `json:"units"`
	Expires   time.Time `json:"expires_at"`
}

func firstToEnd(a, b Ending) int {
	return cmp.Or(a.Expires.Compare(b.Expires), cmp.Compare(a.Wallet, b.Wallet), cmp.Compare(a.Lot, b.Lot))
}

const endingSQL = `
select y.scope, y.no, coalesce(y.reference, ''), y.units, y.expires_at from (
    (select l.scope, l.no, coalesce(l.reference, (l.plan).of_reference) as reference, l.rest as units, l.expires_at from metered.lots l
     where l.open and (l.open or l.untold > 0) and l.expires_at > metered.clock() and l.expires_at < metered.clock() + $1::interval
     order by l.expires_at, l.no limit $2)
    union all
    (select l.scope, l.no, coalesce(l.reference, (l.plan).of_reference) as reference, l.kept, l.expires_at from metered.lots l
     where l.keeps and l.expires_at > metered.clock() and l.expires_at < metered.clock() + $1::interval
     order by l.expires_at, l.no limit $2)) y
order by y.expires_at, y.no limit $2`

// Ending returns the lots of all wallets that end within a time and have units left, the first to
// end first. A lot that no write has begun is not among them: see Walk.Ending.
func (r *Reader) Ending(ctx context.Context, within time.Duration, limit int) ([]Ending, error) {
	limit, err := pageSize(limit)
	if err != nil {
		return nil, err
	}
	list, err := collect(ctx, r, endingSQL, scanEnding, interval(within), limit)
	return list, failed("ending lots", err)
}

func interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}

func scanEnding(row pgx.CollectableRow) (e Ending, err error) {
	err = row.Scan(&e.Wallet, &e.Lot, &e.Reference, &e.Units, &e.Expires)
	e.Expires = e.Expires.UTC()
	return e, err
}

// endingOfSQL are the lots of wallets of which none is due.
const endingOfSQL = `
select w.scope, y.no, coalesce(y.reference, ''), y.units, y.expires_at
from pg_catalog.unnest($3::text[]) w(scope), lateral (
    (select l.no, coalesce(l.reference, (l.plan).of_reference) as reference, l.rest as units, l.expires_at from metered.lots l
     where l.scope = w.scope and l.open and l.expires_at < metered.clock() + $1::interval
     order by l.expires_at, l.age limit $2)
    union all
    (select l.no, coalesce(l.reference, (l.plan).of_reference) as reference, l.kept, l.expires_at from metered.lots l
     where l.scope = w.scope and l.keeps and l.expires_at < metered.clock() + $1::interval
     order by l.expires_at, l.age limit $2)) y
order by y.expires_at, w.scope, y.no limit $2`

// dueSQL are the wallets that have a lot which is due and not written.
const dueSQL = `
select w.scope from pg_catalog.unnest($1::text[]) w(scope), lateral (
    select l.lots_end, l.next_due from metered.ledger l where l.scope = w.scope order by l.seq desc limit 1) t
where t.lots_end <= metered.clock() or t.next_due <= metered.clock()`

// endingOf is Ending of some wallets. It has all their lots, written or not.
func (r *Reader) endingOf(ctx context.Context, wallets []string, within time.Duration, limit int) ([]Ending, error) {
	if len(wallets) == 0 {
		return nil, nil
	}
	due, err := collect(ctx, r, dueSQL, pgx.RowTo[string], wallets)
	if err != nil {
		return nil, failed("ending lots", err)
	}
	wallets = slices.DeleteFunc(slices.Clone(wallets), func(name string) bool { return slices.Contains(due, name) })
	list, err := collect(ctx, r, endingOfSQL, scanEnding, interval(within), limit, wallets)
	if err != nil {
		return nil, failed("ending lots", err)
	}
	for _, name := range due {
		b, err := r.Wallets.Balance(ctx, r.DB, name)
		if err != nil {
			return nil, err
		}
		for _, l := range b.Lots {
			if l.Units > 0 && !l.Expires.IsZero() && l.Expires.Before(b.Now.Add(within)) {
				list = append(list, Ending{Wallet: name, Lot: l.Lot, Reference: l.Reference, Units: l.Units, Expires: l.Expires})
			}
		}
	}
	slices.SortFunc(list, firstToEnd)
	return list[:min(len(list), limit)], nil
}

// Wallet returns the present content of a wallet, by Wallets.Balance, or nil if the scope is none.
// Due lots have ended.
func (r *Reader) Wallet(ctx context.Context, name string) (*Wallet, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	is, err := collect(ctx, r, isWalletSQL, pgx.RowTo[bool], name)
	if err != nil || len(is) == 0 || !is[0] {
		return nil, failed("wallet", err)
	}
	w := new(Wallet)
	if w.Balance, err = r.Wallets.Balance(ctx, r.DB, name); err != nil {
		return nil, err
	}
	for _, l := range w.Lots {
		if l.Units > 0 && !l.Expires.IsZero() && l.Uses == nil {
			switch {
			case w.NextEnd.IsZero() || l.Expires.Before(w.NextEnd):
				w.NextEnd, w.NextUnits = l.Expires, l.Units
			case l.Expires.Equal(w.NextEnd):
				w.NextUnits += l.Units
			}
		}
		i, found := slices.BinarySearchFunc(w.Categories, l.Category, func(c CategoryRest, name string) int { return cmp.Compare(c.Category, name) })
		if !found {
			w.Categories = slices.Insert(w.Categories, i, CategoryRest{Category: l.Category})
		}
		w.Categories[i].Units += l.Units
		w.Categories[i].Held += l.Held
	}
	return w, nil
}

const isWalletSQL = `
select l.lots_end is not null from metered.ledger l where l.scope = $1 order by l.seq desc limit 1`

// LotState is the state of a lot.
type LotState string

const (
	LotPending LotState = "pending" // it begins later
	LotOpen    LotState = "open"    // something can be drawn of it
	LotHeld    LotState = "held"    // its remaining units are in open holds and leases
	LotEnded   LotState = "ended"   // something was left at its end, whether that is written down or not
	LotRevoked LotState = "revoked" // all of it was taken back
	LotUsedUp  LotState = "used up"
)

// Lot is a lot and its units: Granted = Rest + Drawn + Held + Lapsed + Revoked + Rolled + Pending.
type Lot struct {
	No        int64     `json:"lot"`
	Scope     string    `json:"wallet"`
	Reference string    `json:"reference,omitempty"` // its own, or that of the lot that had its units first
	Category  string    `json:"category,omitempty"`
	Priority  int       `json:"priority"`
	State     LotState  `json:"state"`
	From      int64     `json:"from_lot,omitempty"`  // the lot that its units were in before
	GrantedAt time.Time `json:"granted_at"`          // of a pending lot: when it begins
	Expires   time.Time `json:"expires_at,omitzero"` // zero if it never ends
	Granted   int64     `json:"granted"`
	Rest      int64     `json:"rest"` // of an ended lot: lapses or rolls over with the wallet's next write or sweep
	Drawn     int64     `json:"drawn"`
	Held      int64     `json:"held"`
	Lapsed    int64     `json:"lapsed"`
	Revoked   int64     `json:"revoked"`
	Rolled    int64     `json:"rolled"`
	Pending   int64     `json:"pending,omitempty"`
	Uses      []string  `json:"uses,omitempty"` // what it pays for alone
}

// LotList is a page of lots.
type LotList struct {
	Lots []Lot  `json:"lots"`
	Next string `json:"next,omitempty"` // continues the list, "" at its end
}

const lotsSQL = `
select l.no, l.scope, coalesce(l.reference, (l.plan).of_reference, ''), l.category, l.priority, coalesce(l.from_lot, 0), l.granted_at, nullif(l.expires_at, 'infinity'),
    l.amount, l.rest + l.kept, l.drawn, l.held, l.lapsed, l.revoked, l.rolled, l.pending, (l.plan).uses,
    case when l.pending > 0 then 'pending' when l.rest + l.kept > 0 and l.expires_at <= c.now then 'ended' when l.rest + l.kept > 0 then 'open' when l.held > 0 then 'held'
        when l.lapsed > 0 or l.rolled > 0 then 'ended' when l.revoked = l.amount then 'revoked' else 'used up' end
from (select metered.clock() as now offset 0) c, metered.lots l
where l.scope = $1 and l.no < $2
order by l.no desc limit $3`

// Lots lists all lots of a wallet that were not purged, newest first.
func (r *Reader) Lots(ctx context.Context, scope, after string, limit int) (LotList, error) {
	limit, err := pageSize(limit)
	if err := cmp.Or(err, checkText("scope", scope)); err != nil {
		return LotList{}, err
	}
	before := int64(math.MaxInt64)
	if after != "" {
		if before, err = strconv.ParseInt(after, 10, 64); err != nil {
			return LotList{}, invalid("after", "%q is not a LotList.Next", after)
		}
	}
	lots, err := collect(ctx, r, lotsSQL, func(row pgx.CollectableRow) (l Lot, err error) {
		var ends *time.Time
		err = row.Scan(&l.No, &l.Scope, &l.Reference, &l.Category, &l.Priority, &l.From, &l.GrantedAt, &ends,
			&l.Granted, &l.Rest, &l.Drawn, &l.Held, &l.Lapsed, &l.Revoked, &l.Rolled, &l.Pending, &l.Uses, &l.State)
		l.GrantedAt, l.Expires = l.GrantedAt.UTC(), moment(ends)
		return l, err
	}, scope, before, limit)
	if err != nil {
		return LotList{}, failed("lots", err)
	}
	list := LotList{Lots: append([]Lot{}, lots...)}
	if len(lots) == limit {
		list.Next = strconv.FormatInt(lots[limit-1].No, 10)
	}
	return list, nil
}
