package metered

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
)

// start begins to renew the session's hold. The work may end, by ctx, before it is settled.
func (s *session) start(ctx context.Context) {
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.done = make(chan struct{})
	var renewing context.Context
	renewing, s.stop = context.WithCancel(context.WithoutCancel(ctx)) // a renewal on its way does not keep the session from ending
	go s.renewals(renewing)
}

// renewals renews the hold whenever about a third of its TTL is over, and sooner after an error, until the session
// ends. The jitter keeps sessions that were opened at once from being renewed at once. A hold that cannot be renewed is
// passed to the work: at the deadline, since it can still be settled within its grace, or at once if it has ended.
func (s *session) renewals(ctx context.Context) {
	defer close(s.done)
	ttl := s.r.TTL
	var failed error
	for {
		pause := s.left()
		if failed == nil {
			pause -= ttl*2/3 + rand.N(ttl/10+1)
		} else if !errors.Is(failed, holds.ErrCeiling) {
			pause = min(pause, ttl/20+rand.N(ttl/20+1), 5*time.Second)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(pause, 0)):
		}
		if failed != nil && s.left() <= 0 {
			s.cancel(&RenewalError{ID: s.r.ID, Due: s.due(), Cause: failed})
			return
		}
		failed = s.renew(ctx)
		switch {
		case failed == nil:
			s.tell(sessionRenewed)
		case ctx.Err() != nil: // the session ends
		case errors.Is(failed, ErrLost) && !s.settling():
			s.close(failed, sessionLost)
			return
		case !errors.Is(failed, ErrLost) && !errors.Is(failed, holds.ErrCeiling):
			s.tell(sessionNotRenewed)
		}
	}
}

var errInGrace = errors.New("metered: the hold is past its deadline, and in its grace")

// renew makes the hold last for TTL from now, or until its ceiling.
func (s *session) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(s.left()/2, 100*time.Millisecond)) // another connection may fare better
	defer cancel()
	began := time.Now()
	var h holds.Hold
	err := s.client.RunTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(ctx context.Context, tx pgx.Tx) (err error) {
		book := s.client.Holds
		if h, err = book.Get(ctx, tx, s.r.Namespace, s.id, s.r.Holder); err != nil {
			return err
		}
		by := s.r.TTL - h.Remaining()
		if !h.Ceiling.IsZero() {
			by = min(by, h.Ceiling.Sub(h.Deadline))
		}
		switch by = by.Truncate(time.Microsecond); {
		case h.State != holds.Held:
			return &holds.StateError{ID: h.ID, State: h.State, Hold: h}
		case !h.Live():
			return errInGrace
		case by <= 0:
			return nil
		}
		all, err := book.Extend(ctx, tx, holds.Extend{Tenant: s.r.Namespace, IDs: []string{s.id}, Holder: s.r.Holder, By: by, Note: s.r.Note})
		if err == nil {
			h = all[0]
		}
		return err
	})
	if err != nil {
		return s.lost(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold, s.deadline = h, began.Add(h.Remaining())
	if !h.Ceiling.IsZero() && !h.Deadline.Before(h.Ceiling) {
		return &holds.CeilingError{ID: s.id}
	}
	return nil
}

// left is how long the hold lasts yet, at least.
func (s *session) left() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}

func (s *session) due() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hold.Due
}

// settling reports whether a Settle or Cancel goes on, which may have ended the hold.
func (s *session) settling() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settles > 0
}
