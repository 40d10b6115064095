package wallet

import (
	"cmp"
	"context"
	"iter"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Line is an entry, with its effect on lots.
type Line struct {
	budget.Entry

	// Balance is the balance after the entry: Credited - Spent + Refunded - Held.
	Balance int64 `json:"balance"`

	// Lots are the effects of the entry on lots, in order.
	Lots []Move `json:"lots,omitempty"`
}

var moveKinds = map[string]string{
	"d": "credited", "t": "taken", "p": "paid back", "g": "given back", "h": "held", "q": "held after", "u": "captured", "f": "freed",
	"e": "lapsed", "v": "revoked", "o": "rolled over", "s": "scheduled", "w": "withdrawn", "a": "applied", "b": "kept", "n": "reinstated", "m": "reinstated",
}

// Move is the effect of an entry on a lot.
type Move struct {
	Lot       int64  `json:"lot"` // 0 for units that no lot covers
	Reference string `json:"reference,omitempty"`
	Category  string `json:"category,omitempty"`
	// Kind is "credited" for a new lot, "taken" by a charge, "given back" by a refund, "held",
	// "captured" or "freed" by a hold, "lapsed", "revoked" or "rolled over", before a lot begins
	// "scheduled" (also for an end that is set) or "withdrawn", for an overdraft "paid back", and
	// for overdrawn units of an earlier hold "held after". Units of a lot with Uses are "applied"
	// to the next entry, and "kept" again by the one after a release or a refund.
	Kind   string `json:"kind,omitempty"`
	Amount int64  `json:"amount"`
}

const movesSQL = `
select m.seq, m.lot, coalesce(l.reference, (l.plan).of_reference, ''), coalesce(l.category, ''), m.kind::text, m.amount
from metered.lot_moves m left join metered.lots l on l.no = m.lot
where m.scope = $1 and m.seq between $2 and $3
order by m.seq, m.nth`

// statementPage is how many entries are read between two looks at their moves.
const statementPage = 200

// Statement is budget.Ledger.Entries with the balance and the effect on lots (docs/credit.md).
func (b *Book) Statement(ctx context.Context, db budget.Querier, wallet string, opts budget.EntriesOptions) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) {
		if err := cmp.Or(b.made(), notNil("db", db), checkWallet("wallet", wallet)); err != nil {
			yield(Line{}, err)
			return
		}
		page := make([]Line, 0, statementPage)
		flush := func() bool {
			if err := b.moves(ctx, db, wallet, page); err != nil {
				return yield(Line{}, err) && false
			}
			for _, line := range page {
				if !yield(line, nil) {
					return false
				}
			}
			page = page[:0]
			return true
		}
		for e, err := range b.ledger.Entries(ctx, db, wallet, opts) {
			if err != nil {
				yield(Line{}, err)
				return
			}
			page = append(page, Line{Entry: e, Balance: e.Credited - e.Spent + e.Refunded - e.Held})
			if len(page) == statementPage && !flush() {
				return
			}
		}
		if len(page) > 0 {
			flush()
		}
	}
}

// moves adds their effects on lots to a page of entries.
func (b *Book) moves(ctx context.Context, db budget.Querier, wallet string, page []Line) error {
	first, last := page[0].Seq, page[len(page)-1].Seq
	rows, err := db.Query(ctx, b.sql.moves, wallet, min(first, last), max(first, last))
	if err != nil {
		return failed("statement", err)
	}
	lines := make(map[int64]*Line, len(page))
	for i := range page {
		lines[page[i].Seq] = &page[i]
	}
	var seq int64
	var m Move
	var kind string
	_, err = pgx.ForEachRow(rows, []any{&seq, &m.Lot, &m.Reference, &m.Category, &kind, &m.Amount}, func() error {
		if line := lines[seq]; line != nil {
			m.Kind = moveKinds[kind]
			line.Lots = append(line.Lots, m)
		}
		return nil
	})
	return failed("statement", err)
}
