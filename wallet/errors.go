package wallet

import (
	"math"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Refusals. They leave the transaction usable, as does *budget.ExceededError.
var (
	// ErrConflict says that the reference was used for another grant, so do not repeat this one.
	ErrConflict error = fault.New("wallet_conflict", "wallet: the reference was used for another grant")

	// ErrExpired says that the lot would have ended by now, by the database's clock.
	ErrExpired error = fault.New("wallet_expired", "wallet: the lot would have ended by now, by the database's clock")

	// ErrUnknownLot says that the wallet has no such lot.
	ErrUnknownLot error = fault.New("wallet_unknown_lot", "wallet: the wallet has no such lot")
)

var errArgument = fault.New("invalid_argument", "wallet: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// failed turns the error of a statement into the package's own, or that of package budget which it
// is.
func failed(doing string, err error) error {
	switch sqlstate.Of(err) {
	case sqlstate.Exceeded, sqlstate.WindowPurged, sqlstate.ClockBehind, sqlstate.NumericOutOfRange,
		sqlstate.UnknownZone:
		return inBudget.Failed(doing, err)
	}
	return fault.Failed("wallet", doing, err)
}

func checkWallet(field, wallet string) error {
	if wallet == "" {
		return invalid(field, "is empty")
	}
	return fault.Text(errArgument, field, wallet, maxTextBytes)
}

func checkAmount(field string, amount int64) error {
	if amount < 1 || amount > bounds.MaxAmount {
		return invalid(field, "%d is not from 1 to %d", amount, int64(bounds.MaxAmount))
	}
	return nil
}

func checkPriority(field string, p int) error {
	if p < math.MinInt32 || p > math.MaxInt32 {
		return invalid(field, "%d is not an int32", p)
	}
	return nil
}

func checkDuration(field string, d time.Duration) error {
	if d < time.Microsecond || d > maxDuration || d%time.Microsecond != 0 {
		return invalid(field, "%v is not from 1µs to %v in whole microseconds", d, maxDuration)
	}
	return nil
}

func checkLate(field string, d time.Duration) error {
	if d == Lapse || d == Forever {
		return nil
	}
	return checkDuration(field, d)
}
