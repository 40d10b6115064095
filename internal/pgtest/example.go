package pgtest

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Example is Open for an example, which has no testing.TB. A failure panics, and done ends it.
func Example() (pool *pgxpool.Pool, done func()) {
	tb := &exampleTB{}
	return Open(tb), tb.end
}

// ExampleAt is Example with a clock that stands still.
func ExampleAt(at time.Time) (pool *pgxpool.Pool, clock *Clock, done func()) {
	tb := &exampleTB{}
	pool = Open(tb)
	return pool, SetClock(tb, pool, at), tb.end
}

// exampleTB is as much of a testing.TB as Open needs.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (*exampleTB) Helper()                           {}
func (*exampleTB) Name() string                      { return "Example" }
func (*exampleTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*exampleTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (tb *exampleTB) Cleanup(f func())               { tb.cleanups = append(tb.cleanups, f) }

func (tb *exampleTB) end() {
	for _, f := range slices.Backward(tb.cleanups) {
		f()
	}
}
