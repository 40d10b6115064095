package leases

import (
	"math"
	"sync/atomic"
	"time"
)

// slice is a lease that this process spends from.
type slice struct {
	no, fence int64
	granted   int64
	opened    time.Time
	// ends is when this process stops spending from it: before the database's end, since it counts
	// from before the request. endsWall is the same by the wall clock, which goes on while a
	// machine sleeps.
	ends     time.Time
	endsWall int64

	used  atomic.Int64 // units taken so far, from 0 up. sealed when no more may be taken
	asked atomic.Bool  // the next one was requested

	seen   int64     // used, when the maintenance last looked
	seenAt time.Time // and since when it has been that
	total  int64     // units taken, once sealed
}

const sealed = math.MaxInt64 / 2

// take takes amount units, if they are there, and returns where they begin.
func (s *slice) take(amount int64) (offset int64, ok bool) {
	for {
		offset = s.used.Load()
		if offset+amount > s.granted {
			return 0, false
		}
		if s.used.CompareAndSwap(offset, offset+amount) {
			break
		}
	}
	// Read the clock after taking: a goroutine that slept in between must not spend units that
	// others have settled.
	now := time.Now()
	return offset, now.Before(s.ends) && now.UnixNano() < s.endsWall
}

// give gives taken units back.
func (s *slice) give(amount int64) {
	for {
		used := s.used.Load()
		if used >= sealed || s.used.CompareAndSwap(used, used-amount) {
			return
		}
	}
}

// seal ends the taking and returns how much was taken.
func (s *slice) seal() int64 {
	if used := s.used.Swap(sealed); used < sealed {
		s.total = used
	}
	return s.total
}

func (s *slice) over(now time.Time) bool {
	return !now.Before(s.ends) || now.UnixNano() >= s.endsWall
}
