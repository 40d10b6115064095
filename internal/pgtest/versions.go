package pgtest

import (
	"crypto/sha256"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// eachVersion is set where only the tests are wanted that run on each version of Postgres: to
// "all", or to "0 SEED" and "1 SEED", which have half of them each, and with other seeds other
// halves.
var eachVersion = os.Getenv("METERED_EACH_VERSION")

var marked sync.Map // by the names of tests

// OnEachVersion marks a test whose answer may depend on the version of Postgres: plans, isolation
// levels, roles, the wire, races, models. CI runs it on the oldest or the newest version, too, and
// the commit decides on which: METERED_EACH_VERSION leaves out all others that open a database.
// Call it before Open.
func OnEachVersion(t testing.TB) {
	marked.Store(t.Name(), true)
}

func skipUnmarked(t testing.TB) {
	name, _, _ := strings.Cut(t.Name(), "/")
	if eachVersion == "" || !strings.HasPrefix(name, "Test") {
		return
	}
	if _, ok := marked.Load(name); !ok {
		t.Skip("runs on one version of Postgres: see OnEachVersion")
	}
	if half, seed, halves := strings.Cut(eachVersion, " "); halves {
		sum := sha256.Sum256([]byte(seed + name))
		if half != strconv.Itoa(int(sum[0])%2) {
			t.Skip("runs on the other version of Postgres this time")
		}
	}
}
