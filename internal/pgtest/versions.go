package pgtest

import (
	"os"
	"strings"
	"sync"
	"testing"
)

// eachVersion is set where only the tests are wanted that run on each version of Postgres.
var eachVersion = os.Getenv("METERED_EACH_VERSION") != ""

var marked sync.Map // by the names of tests

// OnEachVersion marks a test whose answer may depend on the version of Postgres: plans, isolation levels, roles, the wire, races, models. CI runs it
// on the oldest and the newest version, too: METERED_EACH_VERSION leaves out all others that open a database. Call it before Open.
func OnEachVersion(t testing.TB) {
	marked.Store(t.Name(), true)
}

func skipUnmarked(t testing.TB) {
	if !eachVersion {
		return
	}
	name, _, _ := strings.Cut(t.Name(), "/")
	if _, ok := marked.Load(name); !ok && strings.HasPrefix(name, "Test") {
		t.Skip("runs on one version of Postgres: see OnEachVersion")
	}
}
