package pgtest

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"
)

// seed is where all random numbers of the tests begin: at 1, so that a test that passes once passes
// on each machine. Where Long is true they begin anywhere, and METERED_SEED repeats a run.
var seed = sync.OnceValue(func() uint64 {
	if text := os.Getenv("METERED_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil || n == 0 {
			panic("METERED_SEED is a number above 0, not " + text)
		}
		return n
	}
	if Long {
		return uint64(time.Now().UnixNano())
	}
	return 1
})

// Seed returns the seed of a test's random numbers, and prints how to have them again. It depends
// on the test's name and, where Long is true, on the run.
func Seed(t testing.TB) uint64 {
	t.Helper()
	if Long {
		t.Logf("METERED_SEED=%d has the same random numbers", seed())
	}
	sum := sha256.Sum256([]byte(strconv.FormatUint(seed(), 10) + " " + t.Name()))
	return binary.BigEndian.Uint64(sum[:])
}

// A lockedSource may be used by goroutines at once.
type lockedSource struct {
	mu     sync.Mutex
	source rand.Source
}

func (s *lockedSource) Uint64() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.source.Uint64()
}

var randoms sync.Map // of *rand.Rand, by test

// Random returns the random numbers of a test, which begin at Seed. It returns the same Rand for
// the same t, and goroutines may share it.
func Random(t testing.TB) *rand.Rand {
	t.Helper()
	if r, known := randoms.Load(t); known {
		return r.(*rand.Rand)
	}
	r, known := randoms.LoadOrStore(t, rand.New(&lockedSource{source: rand.NewPCG(Seed(t), 0)}))
	if !known {
		t.Cleanup(func() { randoms.Delete(t) })
	}
	return r.(*rand.Rand)
}
