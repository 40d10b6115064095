package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

// byLot selects the statement of a wallet by lot.
type byLot struct {
	all bool
	lot int64 // of this one alone, if not 0
}

var csvLotHead = []string{"balance", "lot", "reference", "category", "move", "units"}

// statementByLot prints the moves of lots, a row for each. As JSON it is an object for each entry.
func (a *app) statementByLot(ctx context.Context, tx pgx.Tx, scope string, sums budget.RangeUsage,
	of byLot, asCSV bool) error {
	r, err := inspect.New(tx, a.schema)
	if err != nil {
		return err
	}
	if w, err := r.Wallet(ctx, scope); err != nil || w == nil {
		return orUnknownWallet(err, scope)
	}
	sheet := csv.NewWriter(a.out)
	if asCSV {
		_ = sheet.Write(append(slices.Clone(csvHead), csvLotHead...)) // Error, below, has it
	}
	t := a.table("ENTRY", "AT", "KIND", "AMOUNT", "BALANCE", "LOT", "REFERENCE", "CATEGORY", "DOES",
		"UNITS", "ABOUT", "NOTE")
	for line, err := range r.Wallets.Statement(ctx, tx, scope,
		budget.EntriesOptions{From: sums.From, To: sums.To}) {
		if err != nil {
			return err
		}
		if of.lot != 0 {
			line.Lots = slices.DeleteFunc(line.Lots,
				func(m budget.LotMove) bool { return m.Lot != of.lot })
			if len(line.Lots) == 0 {
				continue
			}
		}
		if a.json {
			if err := a.print(line); err != nil {
				return err
			}
			continue
		}
		if len(line.Lots) == 0 {
			line.Lots = []budget.LotMove{{}}
		}
		for _, m := range line.Lots {
			cells := lotCells(m)
			if asCSV {
				_ = sheet.Write(append(append(csvRow(line.Entry),
					strconv.FormatInt(line.Balance, 10)), cells...))
				continue
			}
			row := []any{line.Seq, line.At, line.Kind, line.Amount, line.Balance}
			for _, cell := range cells {
				row = append(row, dash(cell))
			}
			t.row(append(row, about(line.Entry), noteText(line.Note))...)
		}
	}
	switch {
	case a.json:
		return a.print(map[string]any{"period": ranged(sums)})
	case asCSV:
		sheet.Flush()
		return sheet.Error()
	}
	if err := t.flush(); err != nil {
		return err
	}
	a.printSums(sums)
	return nil
}

// lotCells are the lot, its reference and category, its change and the units, empty for an entry
// that changed no lots.
func lotCells(m budget.LotMove) []string {
	if m.Kind == "" {
		return []string{"", "", "", "", ""}
	}
	lot := "overdraft"
	if m.Lot > 0 {
		lot = strconv.FormatInt(m.Lot, 10)
	}
	return []string{lot, m.Reference, m.Category, string(m.Kind), strconv.FormatInt(m.Amount, 10)}
}

func orUnknownWallet(err error, name string) error {
	if err == nil {
		err = fmt.Errorf("%w: scope %q is no wallet: it has no lots", inspect.ErrUnknown, name)
	}
	return err
}
