package pgtest

import (
	"flag"
	"os"
	"runtime"
	"testing"
)

// Tests of a database wait more than they compute, so at least eight run at once. The flag
// -parallel says otherwise.
func init() {
	testing.Init()
	if runtime.GOMAXPROCS(0) < 8 {
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
	}
}

// Long is true where tests that search at random or run for a time do so at full size: with
// METERED_LONG set, as `make long` sets it.
var Long = os.Getenv("METERED_LONG") != ""

// Size returns full where Long is true. Elsewhere it returns quick, a size at which the test still
// finds the fault that its comment names.
func Size[T any](quick, full T) T {
	if Long {
		return full
	}
	return quick
}

// CI is true where the tests that InCI marks run: with METERED_CI set, as .ci/run sets it, and where
// Long is true.
var CI = Long || os.Getenv("METERED_CI") != ""

// Sizes is Size where CI is true. Elsewhere it returns brief, at which the test still sees each kind
// of outcome that it looks for.
func Sizes[T any](brief, quick, full T) T {
	if CI {
		return Size(quick, full)
	}
	return brief
}

// InCI marks a test that takes seconds of processor time, and whose promise a shorter test keeps in
// another form: a load beside faults, a program that is killed, plans of large tables. Elsewhere than
// in CI it skips the test.
func InCI(t testing.TB) {
	t.Helper()
	if !CI {
		t.Skip("CI runs it, and METERED_CI=1 does here")
	}
}
