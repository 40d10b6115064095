package wallet

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// Balance is a wallet at Now, in units.
type Balance struct {
	// Wallet is the scope of the wallet.
	Wallet string `json:"wallet"`

	// Now is the database's clock at the read.
	Now time.Time `json:"now"`

	// Seq is the wallet's last entry, or 0.
	Seq int64 `json:"seq"`

	// Units are what can be drawn without a use and without Config.Overdraft. It is negative if
	// the wallet is overdrawn.
	Units int64 `json:"units"`

	// Held are the units of open holds and leases.
	Held int64 `json:"held"`

	// Overdrawn is -Units, or 0.
	Overdrawn int64 `json:"overdrawn"`

	// Lots are the lots in the order in which they are drawn.
	Lots []Lot `json:"lots"`
}

// Lot is a lot with units left, or held.
type Lot struct {
	// Lot is the lot's number. It is 0 if the lot renews another one, and no write has begun it.
	Lot int64 `json:"lot"`

	// Reference is that of the grant, or "".
	Reference string `json:"reference,omitempty"`

	// Category is that of the grant, or "".
	Category string `json:"category,omitempty"`

	// Priority decides which lot is drawn first: the one with the lowest.
	Priority int `json:"priority"`

	// GrantedAt is when the lot was granted, or when it went on from another one.
	GrantedAt time.Time `json:"granted_at"`

	// Expires is the lot's end. It is zero for never.
	Expires time.Time `json:"expires_at,omitzero"`

	// Amount are the units of the grant.
	Amount int64 `json:"amount"`

	// Units are what can be drawn of the lot.
	Units int64 `json:"units"`

	// Held are the lot's units in open holds and leases.
	Held int64 `json:"held"`

	// Uses are Grant.Uses. The Units of a lot with uses are not in Balance.Units.
	Uses []string `json:"uses,omitempty"`
}

const balanceSQL = `select now, seq, units, held, lots from metered.wallet_balance($1::text)`

// Balance returns the balance of a wallet now.
func (b *Book) Balance(ctx context.Context, db budget.Querier, wallet string) (Balance, error) {
	if err := cmp.Or(b.made(), notNil("db", db), checkWallet("wallet", wallet)); err != nil {
		return Balance{}, err
	}
	r := Balance{Wallet: wallet, Lots: []Lot{}}
	var lots []byte
	if err := answer.QueryRow(ctx, db, b.sql.balance, wallet).Scan(&r.Now, &r.Seq, &r.Units,
		&r.Held, &lots); err != nil {
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

// For returns the units to draw for a use: those of Units, and of the lots that pay for it.
func (b Balance) For(use string) int64 {
	kept := int64(0)
	for _, l := range b.Lots {
		if slices.Contains(l.Uses, use) {
			kept += l.Units
		}
	}
	if kept == 0 {
		return b.Units
	}
	return kept + max(0, b.Units) // such a lot pays no overdraft of others
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

// Expiring returns the units that lapse before a time unless drawn.
func (b Balance) Expiring(before time.Time) (units int64) {
	for _, l := range b.Lots {
		if !l.Expires.IsZero() && l.Expires.Before(before) {
			units += l.Units
		}
	}
	return units
}
