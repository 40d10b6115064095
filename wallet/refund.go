package wallet

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// Refund gives back part or all of a draw, named by its Wallet and Seq: it is budget.Ledger.Refund. Calls together give back no more
// than the draw took, else *budget.RefundExceedsError.
func (b *Book) Refund(ctx context.Context, tx pgx.Tx, r budget.Refund) (budget.Posted, error) {
	if err := b.made(); err != nil {
		return budget.Posted{}, err
	}
	return b.ledger.Refund(ctx, tx, r)
}
