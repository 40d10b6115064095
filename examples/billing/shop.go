package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// shop sells to accounts that have paid beforehand.
type shop struct {
	pool    *pgxpool.Pool
	metered *metered.Client
}

// rules are the limits that every order must keep, both of them on the account's one scope.
var rules = []budget.Limit{
	budget.Prepaid().Named("credit"),                     // nothing is spent that was not credited
	budget.PerWindow(50_00, 24*time.Hour).Named("daily"), // a credit does not raise it, a refund does
}

func wallet(account string) string { return budget.ScopeKey("wallet", account, "") }

var (
	errNoItem    = errors.New("no such item, or none left")
	errNoAddress = errors.New("there is no address to ship to")
	errNoOrder   = errors.New("no such order, or it was cancelled before")
	errRepeated  = errors.New("the order is there already, or was cancelled")
)

// topUp credits what the payment provider says was paid. It says so until it gets an answer, so this is a command with
// the payment's id: the money is credited once, however often it is announced, and another sum under the id is refused.
func (s *shop) topUp(ctx context.Context, payment, account string, cents int64) (replayed bool, err error) {
	out, err := metered.Do(ctx, s.metered, metered.Command{
		ID: payment, Namespace: "payments", Name: "top-up", Input: []any{account, cents},
	}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Credit(budget.Credit{
			Scope: wallet(account), Amount: cents, Note: budget.Note{Correlation: payment, Reason: "top-up"},
		})
	})
	return out.Replayed, err
}

// order takes the item from stock, ships it and debits the account, or does none of it, in a transaction of the
// application's own.
func (s *shop) order(ctx context.Context, id, account, sku, address string) (cents int64, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		cents, err = s.place(ctx, tx, id, account, sku, address)
		return err
	})
	return cents, err
}

// orderOnce is the same as a command. Sent again with its id it is answered again, where order says errRepeated; and if
// the answer to its COMMIT is lost it finds out what became of it.
func (s *shop) orderOnce(ctx context.Context, id, account, sku, address string) (cents int64, replayed bool, err error) {
	out, err := metered.Do(ctx, s.metered, metered.Command{
		ID: id, Namespace: "orders/" + account, Name: "order", Input: []string{sku, address},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		return s.place(ctx, tx, id, account, sku, address)
	})
	return out.Result, out.Replayed, err
}

// place is the order in whatever transaction it is given. The account is locked from the charge to the commit, so the
// charge comes late: here the row that names it is all that follows. Where no row has to, leave it to the command: with
// Tx.Charge, or Command.Charges, the charge travels with COMMIT.
func (s *shop) place(ctx context.Context, tx pgx.Tx, id, account, sku, address string) (cents int64, err error) {
	if cents, err = ship(ctx, tx, id, account, sku, address); err != nil {
		return 0, err
	}
	receipt, err := s.metered.Budget.Charge(ctx, tx, budget.Charge{
		Scope: wallet(account), Amount: cents, Limits: rules,
		Note: budget.Note{Actor: account, Correlation: id, Reason: sku},
	})
	if err != nil {
		return 0, err // the transaction rolls back, and with it what was shipped
	}
	_, err = tx.Exec(ctx, orderSQL, account, id, sku, cents, receipt.Entries[0].Seq)
	if violates(err, "orders_pkey") { // it was cancelled: nothing was shipped by this id any more
		err = errRepeated
	}
	return cents, err
}

const orderSQL = `insert into orders (account, id, sku, cents, entry) values ($1, $2, $3, $4, $5)`

const takeSQL = `update items set stock = stock - 1 where sku = $1 and stock > 0 returning cents`

const shipSQL = `insert into shipments (account, order_id, address) values ($1, $2, $3)`

func ship(ctx context.Context, tx pgx.Tx, id, account, sku, address string) (cents int64, err error) {
	if err := tx.QueryRow(ctx, takeSQL, sku).Scan(&cents); errors.Is(err, pgx.ErrNoRows) {
		return 0, errNoItem
	} else if err != nil {
		return 0, err
	}
	_, err = tx.Exec(ctx, shipSQL, account, id, address)
	switch {
	case violates(err, "shipments_pkey"):
		return 0, errRepeated
	case violates(err, "shipments_address_check"):
		return 0, errNoAddress
	}
	return cents, err
}

func violates(err error, constraint string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.ConstraintName == constraint
}

const cancelSQL = `
update orders set cancelled = now() where account = $1 and id = $2 and cancelled is null
returning sku, cents, entry`

const restockSQL = `
with back as (delete from shipments where account = $1 and order_id = $2)
update items set stock = stock + 1 where sku = $3`

// cancel takes an order back: item, shipment and money, once. The refund names the charge, counts at the charge's time
// and can never be more than it was, so the day's cap has the room again and no more than that.
func (s *shop) cancel(ctx context.Context, id, account string) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var sku string
		var cents, entry int64
		err := tx.QueryRow(ctx, cancelSQL, account, id).Scan(&sku, &cents, &entry)
		if errors.Is(err, pgx.ErrNoRows) {
			return errNoOrder
		} else if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, restockSQL, account, id, sku); err != nil {
			return err
		}
		_, err = s.metered.Budget.Refund(ctx, tx, budget.Refund{
			Scope: wallet(account), Seq: entry, Amount: cents, Note: budget.Note{Correlation: id, Reason: "cancelled: " + sku},
		})
		return err
	})
}
