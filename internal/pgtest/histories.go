package pgtest

import (
	"flag"
	"os"
	"strconv"
	"testing"
)

// Histories sets how many random histories each test of pgregory.net/rapid tries, unless
// -rapid.checks does: quick in CI, full where Long is true, elsewhere a half of quick, and under
// -short a quarter. It also
// sets -rapid.seed, as Seed has it: the same histories in each run, and others where Long is true.
// A failure prints the seed that repeats it, so there is no need for a file of it.
func Histories(quick, full int) {
	flag.Parse()
	checks := Sizes(quick/2, quick, full)
	if testing.Short() {
		checks = quick / 4 * 5 // of which rapid then makes a fifth
	}
	given := map[string]bool{"rapid.seed": os.Getenv("RAPID_SEED") != ""}
	flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for name, value := range map[string]string{
		"rapid.checks": strconv.Itoa(checks), "rapid.nofailfile": "true", "rapid.seed": strconv.FormatUint(seed(), 10),
	} {
		if given[name] {
			continue
		}
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
}
