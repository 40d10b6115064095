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
	Lots []budget.LotMove `json:"lots,omitempty"`
}

var moveKinds = map[string]budget.MoveKind{
	"d": "credited", "t": "taken", "p": "paid back", "g": "given back", "h": "held", "q": "held after",
	"u": "captured", "f": "freed", "e": "lapsed", "v": "revoked", "n": "reinstated", "m": "reinstated",
	"o": "rolled over", "s": "scheduled", "w": "withdrawn", "a": "applied", "b": "kept",
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
	var m budget.LotMove
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
