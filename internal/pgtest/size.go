package pgtest

import "os"

// Long is true where tests that search at random or run for a time do so at full size: with METERED_LONG set, as `make long`
// sets it.
var Long = os.Getenv("METERED_LONG") != ""

// Size returns full where Long is true. Elsewhere it returns quick, a size at which the test still finds the fault that its
// comment names.
func Size[T any](quick, full T) T {
	if Long {
		return full
	}
	return quick
}
