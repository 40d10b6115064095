package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/wallet"
)

var errCredit = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "want an id, and an amount of micro-dollars"}

// credit grants a lot of paid or given credit. The payment's id makes it one lot, however often the request comes.
func (g *gateway) credit(w http.ResponseWriter, r *http.Request) error {
	organisation, err := g.admin(r)
	if err != nil {
		return err
	}
	var payment struct {
		ID       string    `json:"id"`
		Amount   int64     `json:"amount"`
		Category string    `json:"category"`
		Expires  time.Time `json:"expires"`
	}
	payment.Category = "paid"
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&payment); err != nil || payment.ID == "" {
		return errors.Join(errCredit, err)
	}
	var granted wallet.Granted
	err = g.metered.RunTx(r.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) (err error) {
		granted, err = g.wallet.Grant(ctx, tx, wallet.Grant{
			Wallet: credit(organisation), Amount: payment.Amount, Category: payment.Category, Expires: payment.Expires, Reference: payment.ID,
		})
		return err
	})
	if err != nil {
		return err
	}
	return answer(w, granted)
}
