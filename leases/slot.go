package leases

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgmetered/metered/budget"
)

// slot is a process's share of a scope for one set of limits: the slice that serves charges, and
// the next one.
type slot struct {
	scope     string
	limits    []budget.Limit
	rule      *Rule
	memory    bool // for Allow
	mustExist bool // as in budget.Charge

	current atomic.Pointer[slice]      // serves charges, nil for none
	refused atomic.Pointer[[]*refusal] // the last ones, newest first, one for an amount. Nil for none
	stands  atomic.Pointer[standing]

	mu       sync.Mutex
	next     *slice
	opening  chan struct{} // closed when the request for a slice has ended. Nil without a request
	pinned   bool          // Limiter has given it out
	retired  bool          // it was forgotten, and has no slices any more
	direct   time.Time     // until then charges go to the ledger directly
	recall   time.Time     // when a notice of another process last made it give back its slices
	recalled bool          // a notice came since, too soon to be followed
	given    int           // how often it gave back its slices
	warmth   int           // charges that found no slice, within a short time
	warmed   time.Time
	rate     float64 // units a second, of late
	failed   error   // why no slice could be opened when it was last tried
	failure  time.Time
}

// standing is the standing of the limits when a slice was opened, or after a direct charge.
type standing struct {
	of    []budget.Standing
	slice *slice // nil for a direct charge
}

// refusal is an answer that Allow, or Charge, repeats for the same amount until a time.
type refusal struct {
	amount int64
	sure   bool // only time ends it, or a refund
	at     time.Time
	until  time.Time
	err    *budget.ExceededError
}

// again is the error of a refusal, as it is now.
func (r *refusal) again(now time.Time) error {
	e := &budget.ExceededError{Refusals: slices.Clone(r.err.Refusals)}
	for i := range e.Refusals {
		if after := &e.Refusals[i].RetryAfter; *after != budget.Never {
			*after = max(0, *after-now.Sub(r.at))
		}
	}
	return e
}

// take takes units from the slice that is there. ok is false where none has them.
func (s *slot) take(p *Pool, amount int64) (from *slice, offset int64, ok bool) {
	for {
		cur := s.current.Load()
		if cur == nil {
			return nil, 0, false
		}
		offset, ok := cur.take(amount)
		if ok {
			if offset > cur.granted/2 && !cur.asked.Load() && cur.asked.CompareAndSwap(false, true) {
				s.prefetch(p)
			}
			return cur, offset, true
		}
		if !s.turn(p, cur, amount) {
			return nil, 0, false
		}
	}
}

// takeOrWait is take, but waits for a slice that is being opened, since a charge of the ledger
// would wait for the same lock. It does not wait for long: the transaction may have that lock.
func (s *slot) takeOrWait(ctx context.Context, p *Pool, amount int64) (from *slice, offset int64, ok bool) {
	if from, offset, ok = s.take(p, amount); ok {
		return from, offset, true
	}
	opening := s.miss(p, time.Now())
	if opening == nil {
		return nil, 0, false
	}
	wait := time.NewTimer(openWait)
	defer wait.Stop()
	select {
	case <-opening:
		return s.take(p, amount)
	case <-wait.C:
	case <-ctx.Done():
	}
	return nil, 0, false
}

// turn gives cur back and puts the next slice, if there is one, in its place.
func (s *slot) turn(p *Pool, cur *slice, amount int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current.Load() != cur {
		return true
	}
	if amount > cur.granted && s.next == nil && !cur.over(time.Now()) {
		return false // a charge larger than the slice goes to the ledger
	}
	s.measure(cur.seal(), cur.opened)
	s.current.Store(s.next)
	s.next = nil
	p.settleSoon(s, cur)
	return s.current.Load() != nil
}

// measure takes note of the demand.
func (s *slot) measure(used int64, since time.Time) {
	seconds := max(time.Since(since).Seconds(), 0.001)
	s.rate = max(float64(used)/seconds, s.rate/2)
}

// size is the size of the next slice: enough to last for a while, at the demand seen.
func (s *slot) size() int64 {
	return min(max(int64(s.rate*s.rule.SliceLasts.Seconds()), s.rule.MinSlice), s.rule.MaxSlice)
}

// prefetch asks for the next slice in the background.
func (s *slot) prefetch(p *Pool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cur := s.current.Load(); cur != nil {
		s.measure(min(cur.used.Load(), cur.granted), cur.opened)
	}
	s.ask(p)
}

// ask requests the next slice, unless it is there or requested, or charges go to the ledger. mu is
// held.
func (s *slot) ask(p *Pool) {
	now := time.Now()
	if s.retired || s.opening != nil || s.next != nil || now.Before(s.direct) || s.failed != nil &&
		now.Sub(s.failure) < failurePause {
		return
	}
	s.opening = make(chan struct{})
	done, given := s.opening, s.given
	p.work.Go(func() {
		got, err := p.open(p.last, s)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.opening = nil
		defer close(done)
		s.arrived(p, got, err, s.given != given)
	})
}

// arrived takes the slice that was asked for, if any. recalled says that the slot gave up its
// slices meanwhile. mu is held.
func (s *slot) arrived(p *Pool, got *slice, err error, recalled bool) {
	s.failed = err
	switch {
	case err != nil:
		s.failure = time.Now()
		p.report(err)
	case got == nil: // too little is left
		s.direct = time.Now().Add(directPause)
	case recalled || p.isClosed():
		got.seal()
		p.settleSoon(s, got)
	default:
		if s.next = got; s.current.Load() == nil {
			s.current.Store(got)
			s.next = nil
		}
		p.has(s, true)
	}
}

// miss records a charge that found no slice, and requests one if there are many of them. It returns
// a channel that is closed when the request has ended, nil without one.
func (s *slot) miss(p *Pool, now time.Time) (opening <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, within := warmAt, warmFor
	if s.memory { // a lease costs two calls, and each decision without it one
		at, within = 2, max(warmFor, 2*s.rule.Idle)
	}
	if now.Sub(s.warmed) > within {
		s.warmth, s.warmed = 0, now
	}
	if s.warmth++; s.warmth >= at {
		s.ask(p)
	}
	return s.opening
}

// retire reports whether the slot can be forgotten, and if so forgets it.
func (s *slot) retire(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = !s.pinned && s.current.Load() == nil && s.next == nil && s.opening == nil &&
		now.Sub(s.warmed) > forgetAfter && now.After(s.direct)
	return s.retired
}

// notice follows the notice of another process that recalls the slot's units. Whoever may connect
// to the database can send one. So a slot follows one in recallApart, and those between at the end
// of that time (age).
func (s *slot) notice(p *Pool, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recalled = true
	s.follow(p, now)
}

// follow gives back the slot's slices, if a notice recalled them and the last time is long enough
// ago. mu is held.
func (s *slot) follow(p *Pool, now time.Time) {
	if s.recalled && now.Sub(s.recall) >= recallApart {
		s.recalled, s.recall = false, now
		s.giveUp(p, recallPause)
	}
}

// giveBack settles the slot's slices, and charges directly for a while.
func (s *slot) giveBack(p *Pool, direct time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.giveUp(p, direct)
}

// giveUp is giveBack with mu held.
func (s *slot) giveUp(p *Pool, direct time.Duration) {
	s.given++
	if direct > 0 {
		s.direct = time.Now().Add(direct)
	}
	for _, slice := range []*slice{s.current.Swap(nil), s.next} {
		if slice != nil {
			slice.seal()
			p.settleSoon(s, slice)
		}
	}
	s.next = nil
}

// drop gives one slice back.
func (s *slot) drop(p *Pool, no int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next != nil && s.next.no == no {
		s.next.seal()
		p.settleSoon(s, s.next)
		s.next = nil
	}
	if cur := s.current.Load(); cur != nil && cur.no == no {
		cur.seal()
		s.current.Store(s.next)
		s.next = nil
		p.settleSoon(s, cur)
	}
}

const (
	sureFor     = 2 * time.Second // a refusal that only time ends, or a refund, is remembered for so long
	maxRefusals = 8               // of a slot, each of another amount
)

// refuse remembers a refusal of amount units: for a moment, since a refund, a credit or a release
// may end it.
func (s *slot) refuse(amount int64, refused *budget.ExceededError) {
	now := time.Now()
	r := &refusal{amount: amount, err: refused, sure: true, at: now}
	for _, x := range refused.Refusals {
		r.sure = r.sure && (x.Limit.Window > 0 || !x.Limit.Period.IsZero()) && x.Held+x.OwnHeld+x.Leased == 0
	}
	lasts := s.rule.RememberRefusal
	if r.sure {
		lasts = max(lasts, sureFor)
	}
	r.until = now.Add(min(lasts, refused.RetryAfter()))
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []*refusal{r}
	if was := s.refused.Load(); was != nil {
		for _, x := range *was {
			if x.amount != amount && now.Before(x.until) && len(all) < maxRefusals {
				all = append(all, x)
			}
		}
	}
	s.refused.Store(&all)
}

// refusal is the remembered refusal of amount units, nil for none or, with sure, for one that is
// not sure.
func (s *slot) refusal(amount int64, sure bool) error {
	all := s.refused.Load()
	if all == nil {
		return nil
	}
	for _, r := range *all {
		if now := time.Now(); r.amount == amount && (r.sure || !sure) && now.Before(r.until) {
			return r.again(now)
		}
	}
	return nil
}
