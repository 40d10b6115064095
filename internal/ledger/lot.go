package ledger

import "time"

// Lot is metered.new_lot.
type Lot struct {
	Amount              int64
	Prorated            bool          // in place of Amount: the part of its period that is left
	Expires             time.Time     // the zero time for none
	Lasts               time.Duration // 0 for none
	Category, Reference string        // the reference may be ""
	Priority            int
	Fingerprint         []byte
	RollCap             int64 // 0 for none
	RollFor             time.Duration
	Late                *time.Duration
}

// String is the lot as text.
func (l Lot) String() string {
	expires, lasts, rollCap, rollFor, late := "", "", "", "", ""
	if !l.Expires.IsZero() {
		expires = moment(&l.Expires)
	}
	if l.Lasts > 0 {
		lasts = interval(l.Lasts)
	}
	if l.RollCap > 0 {
		rollCap, rollFor = number(l.RollCap), interval(l.RollFor)
	}
	if l.Late != nil {
		late = interval(*l.Late)
	}
	amount := number(l.Amount)
	if l.Prorated {
		amount = ""
	}
	return composite(amount, expires, lasts, text(l.Category), number(int64(l.Priority)), textOrNull(l.Reference), bytes(l.Fingerprint),
		rollCap, rollFor, late)
}

// Plan is metered.lot_plan, as a caller sends it. The zero value is none.
type Plan struct {
	Renews      Period
	RenewAmount int64
	RollTo      Period
	RollAgain   int
	RollShared  bool
	Uses        []string // in their order
}

// Value is the plan as text, or nil for none.
func (p Plan) Value() any {
	if p.Renews.IsZero() && p.RollTo.IsZero() && p.RollAgain == 0 && !p.RollShared && len(p.Uses) == 0 {
		return nil
	}
	renews, amount, rollTo, again, shared, uses := "", "", "", "", "", ""
	if !p.Renews.IsZero() {
		renews, amount = text(p.Renews.String()), number(p.RenewAmount)
	}
	if !p.RollTo.IsZero() {
		rollTo = text(p.RollTo.String())
	}
	if p.RollAgain != 0 {
		again = number(int64(p.RollAgain))
	}
	if p.RollShared {
		shared = boolean(true)
	}
	if len(p.Uses) > 0 {
		uses = text(array(p.Uses))
	}
	return composite(renews, amount, "", rollTo, "", again, shared, "", uses)
}
