package wallet

import (
	"cmp"
	"context"
	"encoding/json"
	"time"
)

// Balance is the balance of a wallet, with its lots.
type Balance struct {
	Wallet    string    `json:"wallet"`
	Now       time.Time `json:"now"`       // when, by the database's clock
	Seq       int64     `json:"seq"`       // the last entry of the ledger that it is read from, or 0
	Units     int64     `json:"units"`     // units that can be drawn, Config.Overdraft aside, or less than 0 if it is overdrawn
	Held      int64     `json:"held"`      // units of open holds and leases
	Overdrawn int64     `json:"overdrawn"` // -Units, if that is more than 0
	Lots      []Lot     `json:"lots"`      // that have something, in the order in which they are drawn
}

// Lot is a lot with units left, or held.
type Lot struct {
	Lot       int64     `json:"lot"` // its number
	Reference string    `json:"reference,omitempty"`
	Category  string    `json:"category,omitempty"`
	Priority  int       `json:"priority"`
	GrantedAt time.Time `json:"granted_at"`
	Expires   time.Time `json:"expires_at,omitzero"` // zero if it never ends
	Amount    int64     `json:"amount"`              // that it was granted with
	Units     int64     `json:"units"`               // that can be drawn
	Held      int64     `json:"held"`                // that open holds and leases keep
}

const balanceSQL = `select now, seq, units, held, lots from metered.wallet_balance($1::text)`

// Balance returns the present balance of a wallet. Lots and holds that are due have ended, written down or not. On a replica it is the
// replica's balance, by its clock.
func (b *Book) Balance(ctx context.Context, db Querier, wallet string) (Balance, error) {
	if err := cmp.Or(b.made(), notNil("db", db), checkWallet("wallet", wallet)); err != nil {
		return Balance{}, err
	}
	r := Balance{Wallet: wallet}
	var lots []byte
	if err := db.QueryRow(ctx, b.sql.balance, wallet).Scan(&r.Now, &r.Seq, &r.Units, &r.Held, &lots); err != nil {
		return Balance{}, failed("balance", err)
	}
	r.Now, r.Overdrawn = r.Now.UTC(), max(0, -r.Units)
	if len(lots) > 0 {
		var rows []struct {
			Lot
			Rest int64 `json:"rest"`
		}
		if err := json.Unmarshal(lots, &rows); err != nil {
			return Balance{}, failed("read lots", err)
		}
		for _, row := range rows {
			row.Units = row.Rest
			r.Lots = append(r.Lots, row.Lot)
		}
	}
	for i := range r.Lots {
		l := &r.Lots[i]
		l.GrantedAt = l.GrantedAt.UTC()
		if !l.Expires.IsZero() {
			l.Expires = l.Expires.UTC()
		}
	}
	return r, nil
}

// Of returns the units in the lots of a category.
func (b Balance) Of(category string) (units int64) {
	for _, l := range b.Lots {
		if l.Category == category {
			units += l.Units
		}
	}
	return units
}

// Expiring returns the units that lapse before a time, unless they are drawn until then.
func (b Balance) Expiring(before time.Time) (units int64) {
	for _, l := range b.Lots {
		if !l.Expires.IsZero() && l.Expires.Before(before) {
			units += l.Units
		}
	}
	return units
}
