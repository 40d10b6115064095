package ledger

import "time"

// Lot is metered.new_lot.
type Lot struct {
	Amount              int64
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
	return composite(number(l.Amount), expires, lasts, text(l.Category), number(int64(l.Priority)), textOrNull(l.Reference), bytes(l.Fingerprint),
		rollCap, rollFor, late)
}
