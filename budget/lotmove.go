package budget

// MoveKind says what an entry did to a lot of a wallet: a participle, such as "lapsed". The entry
// itself is of an EntryKind, a verb, such as "lapse".
//
//	credited      a new lot has units
//	taken         by a charge
//	paid back     for an earlier overdraft
//	given back    by a refund
//	held          by a hold
//	held after    for overdrawn units of an earlier hold
//	captured      held units were spent
//	freed         held units were freed
//	lapsed        the lot ended
//	revoked       by wallet.Book.Revoke
//	reinstated    by wallet.Book.Reinstate
//	rolled over   into another lot
//	scheduled     the lot begins later, or its end was set
//	withdrawn     before the lot began
//	applied       units of a lot with wallet.Grant.Uses, to the next entry
//	kept          for Uses again, after a release or a refund
type MoveKind string

// LotMove is the effect of an entry on a lot of a wallet (see package wallet).
type LotMove struct {
	// Lot is the number of the lot, or 0 for units that no lot covers.
	Lot int64 `json:"lot"`

	// Reference is the wallet.Grant.Reference of the lot.
	Reference string `json:"reference,omitempty"`

	// Category is the wallet.Grant.Category of the lot.
	Category string `json:"category,omitempty"`

	// Kind says what became of the units. It is "" in Posted.Lots, whose units were all taken.
	Kind MoveKind `json:"kind,omitempty"`

	// Amount is the number of units.
	Amount int64 `json:"amount"`
}
