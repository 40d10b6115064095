package budget_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
)

// bucket is the token bucket of golang.org/x/time/rate, in whole numbers: n tokens come evenly each per microseconds, and
// up to burst are kept. Its level is in parts of a token, per of which are one.
type bucket struct{ n, per, burst, level, at int64 }

func newBucket(n, per, burst int64) *bucket { return &bucket{n, per, burst, burst * per, 0} }

func (b *bucket) tokens(at int64) int64 {
	b.level = min(b.burst*b.per, b.level+(at-b.at)*b.n)
	b.at = at
	return b.level / b.per
}

func (b *bucket) allow(at, amount int64) bool {
	if amount > b.tokens(at) {
		return false
	}
	b.level -= amount * b.per
	return true
}

// windowLimit is a sliding window: so many units in any so many microseconds.
type windowLimit struct{ most, length int64 }

type spending struct{ at, amount int64 }

func (w windowLimit) admits(spent []spending, at, amount int64) bool {
	for _, s := range spent {
		if s.at > at-w.length {
			amount += s.amount
		}
	}
	return amount <= w.most
}

// The limits of docs/rates.md, for n units each per microseconds and a burst.
func strict(n, per, burst int64) windowLimit { return windowLimit{burst, (burst*per + n - 1) / n} }

func generous(n, per, burst int64) []windowLimit {
	return []windowLimit{{2 * burst, burst * per / n}, {17 * burst, 16 * burst * per / n}}
}

// anyRate draws a bucket, and schedule draws when its charges come, and of how many units: mostly around the times at which
// a token comes, or a window ends.
func anyRate(rt *rapid.T) (n, per, burst int64) {
	n = rapid.Int64Range(1, 1000).Draw(rt, "tokens")
	per = rapid.SampledFrom([]int64{1_000, 999_983, 1_000_000, 60_000_000, 3_600_000_000}).Draw(rt, "per")
	return n, per, rapid.Int64Range(1, 40).Draw(rt, "burst")
}

func schedule(rt *rapid.T, n, per, burst int64) (all []spending) {
	token, at := per/n, int64(0)
	steps := rapid.SampledFrom([]int64{0, 0, 0, 1, token, 2 * token, burst * per / n, 16 * burst * per / n})
	if rapid.Bool().Draw(rt, "even") {
		steps = rapid.Just(steps.Draw(rt, "each step"))
	}
	for range rapid.IntRange(1, 80).Draw(rt, "charges") {
		at += max(0, steps.Draw(rt, "step")+rapid.SampledFrom([]int64{-1, 0, 0, 0, 1}).Draw(rt, "beside"))
		amount := rapid.OneOf(rapid.Just(int64(1)), rapid.Just(burst), rapid.Int64Range(1, burst+1)).Draw(rt, "amount")
		all = append(all, spending{at, amount})
	}
	return all
}

// Whatever a window of a burst admits, the bucket admits too.
func TestRate_OneWindowNeverAdmitsMoreThanTheBucket(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n, per, burst := anyRate(rt)
		w, b := strict(n, per, burst), newBucket(n, per, burst)
		var spent []spending
		for _, s := range schedule(rt, n, per, burst) {
			if w.admits(spent, s.at, s.amount) {
				spent = append(spent, s)
				require.True(rt, b.allow(s.at, s.amount), "%v", s)
			}
		}
	})
}

// Whatever the bucket admits, the pair of windows admits too.
func TestRate_APairOfWindowsAdmitsAllThatTheBucketAdmits(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n, per, burst := anyRate(rt)
		b := newBucket(n, per, burst)
		greedy := rapid.Bool().Draw(rt, "greedy")
		var spent []spending
		for _, s := range schedule(rt, n, per, burst) {
			if greedy {
				s.amount = max(1, b.tokens(s.at))
			}
			if !b.allow(s.at, s.amount) {
				continue
			}
			for _, w := range generous(n, per, burst) {
				require.True(rt, w.admits(spent, s.at, s.amount), "%v refuses %v", w, s)
			}
			spent = append(spent, s)
		}
	})
}

// A bucket that is emptied at once, and then of each token as it comes, fills both windows of the pair but for one unit.
func TestRate_ThePairCannotBeSmaller(t *testing.T) {
	t.Parallel()
	for _, burst := range []int64{1, 2, 5, 40} {
		const n, per = 4, 1_000_000
		b, most := newBucket(n, per, burst), []int64{0, 0}
		spent := []spending{{0, burst}}
		require.True(t, b.allow(0, burst))
		for at := int64(per / n); at < 17*burst*per/n; at += per / n {
			require.True(t, b.allow(at, 1))
			for i, w := range generous(n, per, burst) {
				require.True(t, w.admits(spent, at, 1), "%v at %d", w, at)
				if !w.admits(spent, at, 2) {
					most[i] = w.most
				} else if !w.admits(spent, at, 3) {
					most[i] = max(most[i], w.most-1)
				}
			}
			spent = append(spent, spending{at, 1})
		}
		require.GreaterOrEqual(t, most[0], 2*burst-1)
		require.GreaterOrEqual(t, most[1], 17*burst-1)
	}
}

// In no time the pair admits more than twice what the bucket could, where the windows are whole microseconds long.
func TestRate_APairOfWindowsAdmitsAtMostTwiceTheBucket(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n, per, burst := anyRate(rt)
		per *= n
		var spent []spending
		for _, s := range schedule(rt, n, per, burst) {
			pair := generous(n, per, burst)
			if pair[0].admits(spent, s.at, s.amount) && pair[1].admits(spent, s.at, s.amount) {
				spent = append(spent, s)
			}
		}
		for i := range spent {
			units := int64(0)
			for _, s := range spent[i:] {
				units += s.amount
				require.LessOrEqual(rt, units*per, 2*(burst*per+(s.at-spent[i].at)*n))
			}
		}
	})
}

// The same of the ledger. Each limit has a scope of its own, and charges come when tokens do, a microsecond before, or later.
func TestRate_TheLedgerStandsToTheBucketAsTheWindowsDo(t *testing.T) {
	t.Parallel()
	const n, per, burst = 7, 1_000_000, 5
	pool, l, clock := open(t)
	limit := func(w windowLimit) budget.Limit {
		return budget.PerWindow(w.most, time.Duration(w.length)*time.Microsecond)
	}
	one, pair := limit(strict(n, per, burst)), []budget.Limit{}
	for _, w := range generous(n, per, burst) {
		pair = append(pair, limit(w))
	}
	most, least := newBucket(n, per, burst), newBucket(n, per, burst)
	random := rand.New(rand.NewPCG(32, 6))
	admitted, refused, at := 0, 0, int64(0)
	for range 120 {
		steps := []int64{0, 0, 1, per/n - 1, per / n, per/n + 1, burst * per / n, burst*per/n + 1}
		at += steps[random.IntN(len(steps))]
		amount := 1 + random.Int64N(3)
		clock.Set(start.Add(time.Duration(at) * time.Microsecond))
		if _, err := charge(t.Context(), pool, l, "one", amount, one); err == nil {
			admitted++
			require.True(t, most.allow(at, amount), "at %d", at)
		} else {
			require.ErrorIs(t, err, budget.ErrExceeded)
			refused++
		}
		if least.allow(at, amount) {
			mustCharge(t, pool, l, "pair", amount, pair...)
		}
	}
	require.Greater(t, admitted, 20)
	require.Greater(t, refused, 20)
}
