package wallet

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

// Draw is units to take from a wallet.
type Draw struct {
	Wallet string

	// Amount are the units to take, from 1 to 2^53.
	Amount int64

	// UpTo takes as many units as there are, with Config.Overdraft, from 1 to Amount.
	UpTo bool

	Note budget.Note
}

// Drawn is the answer of Draw.
type Drawn struct {
	Wallet string `json:"wallet"`

	// Seq names the draw for a refund.
	Seq int64 `json:"seq"`

	At     time.Time `json:"at"`
	Amount int64     `json:"amount"`

	// Lots are the lots that were drawn, in order.
	Lots []LotMove `json:"lots,omitempty"`

	// Overdrawn are the units that no lot covers.
	Overdrawn int64 `json:"overdrawn"`

	// Left is the balance after the draw.
	Left int64 `json:"left"`
}

const drawSQL = `
select coalesce(seq, 0), coalesce(at, 'epoch'), coalesce(amount, 0), lots, coalesce(overdrawn, 0), coalesce(left_over, 0), refused, crossed
from metered.draw(($1::metered.new_charge[])[1], $2::bool, $3::interval, $4::int, $5::metered.origin)`

// Draw takes units from a wallet's lots. If there are too few, it writes nothing and returns a
// *budget.ExceededError, with the available units.
func (b *Book) Draw(ctx context.Context, tx pgx.Tx, d Draw) (drawn Drawn, err error) {
	call, err := b.prepareDraw(d)
	if err = cmp.Or(err, notNil("tx", tx)); err != nil {
		return Drawn{}, err
	}
	ctx, span := b.begin(ctx, "wallet.draw")
	defer func() {
		inBudget.TellRefused(ctx, b.observer, err)
		span.End(err)
	}()
	return ledger.SilentlyIn(ctx, tx, "wallet", func(tx pgx.Tx, telling bool) (Drawn, error) {
		drawn, err := call.Scan(answer.QueryRow(ctx, tx, call.SQL,
			call.Args(ledger.Sending{WaitMS: b.waitMS(), Telling: telling})...))
		if err == nil {
			err = call.Cross(ctx, tx)
		}
		return drawn, err
	})
}

// prepareDraw validates a draw as Draw does, without any SQL.
func (b *Book) prepareDraw(d Draw) (*ledger.Call[Drawn], error) {
	if err := cmp.Or(b.made(), checkWallet("Draw.Wallet", d.Wallet),
		checkAmount("Draw.Amount", d.Amount)); err != nil {
		return nil, err
	}
	charge := b.Charge(d.Wallet, d.Amount)
	charge.Note = d.Note
	call, err := inBudget.Charges(b.ledger, charge)
	if err != nil {
		return nil, err
	}
	var crossed []byte
	return &ledger.Call[Drawn]{
		SQL: b.sql.draw, Locks: call.Locks,
		Cross: func(ctx context.Context, tx pgx.Tx) error { return call.Cross(ctx, tx, crossed) },
		Args: func(s ledger.Sending) []any {
			return []any{ledger.Charges(ledger.Telling(call.Charges, s.Telling)), d.UpTo,
				call.Tolerance, s.WaitMS, s.Origin("")}
		},
		Scan: func(row pgx.Row) (Drawn, error) {
			drawn := Drawn{Wallet: d.Wallet}
			var lots, refused []byte
			if err := row.Scan(&drawn.Seq, &drawn.At, &drawn.Amount, &lots, &drawn.Overdrawn,
				&drawn.Left, &refused, &crossed); err != nil {
				return Drawn{}, call.Failed(err)
			}
			if len(refused) > 0 {
				return Drawn{}, call.Refused(refused)
			}
			if len(lots) > 0 {
				if err := json.Unmarshal(lots, &drawn.Lots); err != nil {
					return Drawn{}, failed("read lots", err)
				}
			}
			drawn.At = drawn.At.UTC()
			return drawn, nil
		},
	}, nil
}

func (b *Book) begin(ctx context.Context, name string) (context.Context, observed.Span) {
	return b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: name})
}

// tellLots reports a call on a lot to the observer, in the caller's transaction.
func (b *Book) tellLots(ctx context.Context, what string) {
	b.observer.Event(ctx, observe.Event{Kind: observe.Lots, Name: what, Pending: true})
}
