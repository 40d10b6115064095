package wallet

import (
	"cmp"
	"context"
	"iter"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
)

// StatementLine is an entry, with its effect on lots.
type StatementLine struct {
	budget.Entry

	// Balance is the balance after the entry: Credited - Spent + Refunded - Held.
	Balance int64 `json:"balance"`

	// Lots are the effects of the entry on lots, in order.
	Lots []LotMove `json:"lots,omitempty"`
}

// MoveKind says what an entry did to a lot: a participle, such as "lapsed". The entry itself is of a
// budget.EntryKind, a verb, such as "lapse".
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
//	revoked       by Book.Revoke
//	reinstated    by Book.Reinstate
//	rolled over   into another lot
//	scheduled     the lot begins later, or its end was set
//	withdrawn     before the lot began
//	applied       units of a lot with Uses, to the next entry
//	kept          for Uses again, after a release or a refund
type MoveKind string

var moveKinds = map[string]MoveKind{
	"d": "credited", "t": "taken", "p": "paid back", "g": "given back", "h": "held", "q": "held after",
	"u": "captured", "f": "freed", "e": "lapsed", "v": "revoked", "n": "reinstated", "m": "reinstated",
	"o": "rolled over", "s": "scheduled", "w": "withdrawn", "a": "applied", "b": "kept",
}

// LotMove is the effect of an entry on a lot.
type LotMove struct {
	// Lot is the number of the lot, or 0 for units that no lot covers.
	Lot int64 `json:"lot"`

	// Reference is the Grant.Reference of the lot.
	Reference string `json:"reference,omitempty"`

	// Category is the Grant.Category of the lot.
	Category string `json:"category,omitempty"`

	// Kind says what became of the units.
	Kind MoveKind `json:"kind,omitempty"`

	// Amount is the number of units.
	Amount int64 `json:"amount"`
}

const movesSQL = `
select m.seq, m.lot, coalesce(l.reference, (l.plan).of_reference, ''), coalesce(l.category, ''), m.kind::text, m.amount
from metered.lot_moves m left join metered.lots l on l.no = m.lot
where m.scope = $1 and m.seq between $2 and $3
order by m.seq, m.nth`

// statementPage is how many entries are read between two looks at their moves.
const statementPage = 200

// Statement is budget.Ledger.Entries with the balance and the effect on lots (docs/credit.md).
func (b *Book) Statement(ctx context.Context, db budget.Querier, wallet string,
	opts budget.EntriesOptions) iter.Seq2[StatementLine, error] {
	return func(yield func(StatementLine, error) bool) {
		if err := cmp.Or(b.made(), notNil("db", db), checkWallet("wallet", wallet)); err != nil {
			yield(StatementLine{}, err)
			return
		}
		page := make([]StatementLine, 0, statementPage)
		flush := func() bool {
			if err := b.moves(ctx, db, wallet, page); err != nil {
				return yield(StatementLine{}, err) && false
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
				yield(StatementLine{}, err)
				return
			}
			page = append(page, StatementLine{Entry: e, Balance: e.Credited - e.Spent + e.Refunded - e.Held})
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
func (b *Book) moves(ctx context.Context, db budget.Querier, wallet string, page []StatementLine) error {
	first, last := page[0].Seq, page[len(page)-1].Seq
	rows, err := answer.Query(ctx, db, b.sql.moves, wallet, min(first, last), max(first, last))
	if err != nil {
		return failed("statement", err)
	}
	lines := make(map[int64]*StatementLine, len(page))
	for i := range page {
		lines[page[i].Seq] = &page[i]
	}
	var seq int64
	var m LotMove
	var kind string
	_, err = pgx.ForEachRow(rows, []any{&seq, &m.Lot, &m.Reference, &m.Category, &kind, &m.Amount},
		func() error {
			if line := lines[seq]; line != nil {
				m.Kind = moveKinds[kind]
				line.Lots = append(line.Lots, m)
			}
			return nil
		})
	return failed("statement", err)
}
