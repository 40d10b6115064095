package wallet

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Refund gives back part or all of a draw: it is budget.Ledger.Refund, with the draw's Wallet and Seq. The units go to the lots that
// they were drawn of, the last one first. Of a lot that has ended they go as its Grant.LateRefunds says: into a new lot, or they lapse. However often it is called, no more is
// given back than was drawn: a dispute after a refund is *budget.RefundExceedsError. Captured units of a hold are given back with holds.Book.Refund,
// by the same rules.
func (b *Book) Refund(ctx context.Context, tx pgx.Tx, r budget.Refund) (budget.Posted, error) {
	if err := b.made(); err != nil {
		return budget.Posted{}, err
	}
	return b.ledger.Refund(ctx, tx, r)
}
