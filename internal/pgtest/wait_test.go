package pgtest_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// ending is a test whose binary ends at a time.
type ending struct {
	testing.TB
	at   time.Time
	said string
}

func (e *ending) Helper() {}

func (e *ending) Deadline() (time.Time, bool) { return e.at, true }

func (e *ending) Fatalf(format string, args ...any) {
	e.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestWaitFor_EndsShortlyBeforeTheBinaryDoes(t *testing.T) {
	t.Parallel()
	long := &ending{TB: t, at: time.Now().Add(time.Hour)}
	require.Equal(t, long.at.Add(-15*time.Second), pgtest.Patience(long))
	ctx, cancel := pgtest.Patient(long)
	defer cancel()
	until, _ := ctx.Deadline()
	require.Equal(t, pgtest.Patience(long), until)

	late := &ending{TB: t, at: time.Now().Add(15 * time.Second)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		pgtest.WaitFor(late, "what never comes", func() bool { return false })
	}()
	<-done
	require.Contains(t, late.said, "what never comes")
}

// A number of seconds in a test is a guess about a machine, which the next busier one exceeds. Tests wait by WaitFor.
// And a test that closes its httptest.Server breaks off the default client's connections, whoever has them.
func TestTests_GuessNoSecondsAndShareNoConnections(t *testing.T) {
	t.Parallel()
	shared := regexp.MustCompile(`\bhttp\.(?:DefaultClient|Post|PostForm|Get|Head)\b`)
	guess := regexp.MustCompile(`\b(?:require|assert)\.Eventually`)
	files := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "pgserver" || strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "node_modules"): // pgserver is below pgtest
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		if guess.Match(text) {
			t.Errorf("%s waits for some seconds: use pgtest.WaitFor", path)
		}
		if strings.HasSuffix(path, "_test.go") && !strings.HasPrefix(d.Name(), "example_") && shared.Match(text) {
			t.Errorf("%s shares connections with tests that close their servers: use pgtest.HTTP", path)
		}
		return err
	}))
	require.Greater(t, files, 300)
}
