package budget

import (
	"math/bits"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
)

// Prorate returns the part of an amount for the rest of a period, from a time in it on, by time and
// rounded down: all of it at the first moment. Errors are those of At.
func (p Period) Prorate(amount int64, from time.Time) (int64, error) {
	if amount < 0 || amount > bounds.MaxLimit {
		return 0, invalid("amount", "%d is not from 0 to %d", amount, int64(bounds.MaxLimit))
	}
	start, end, err := p.At(from)
	if err != nil {
		return 0, err
	}
	from = from.UTC().Truncate(time.Microsecond)
	high, low := bits.Mul64(uint64(amount), uint64(end.Sub(from).Microseconds()))
	part, _ := bits.Div64(high, low, uint64(end.Sub(start).Microseconds()))
	return int64(part), nil
}
