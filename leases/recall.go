package leases

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/listen"
	"github.com/pgmetered/metered/observe"
)

// learn records a refusal, and recalls the leases that hold back its units.
func (p *Pool) learn(err error) {
	var refused *budget.ExceededError
	if !errors.As(err, &refused) {
		return
	}
	for _, r := range refused.Refusals {
		if r.Leased > 0 {
			p.recall(r.Scope)
		}
	}
}

// recall makes all processes, this one included, give back their slices of a scope. It settles
// ended leases itself: their processes may be gone.
func (p *Pool) recall(of string) {
	at, _ := p.recalls.LoadOrStore(of, new(atomic.Int64))
	now, last := time.Now().UnixNano(), at.(*atomic.Int64)
	if before := last.Load(); now-before < int64(recallEvery) || !last.CompareAndSwap(before, now) {
		return
	}
	p.observer.Event(p.live, observe.Event{Kind: observe.Slice, Name: "recalled"})
	p.recalled(of, func(s *slot) { s.giveBack(p, recallPause) })
	p.keep()
	if p.isClosed() {
		return
	}
	p.work.Go(func() {
		p.report(p.settleDue(p.live, new(SweepReport)))
		if p.cfg.NoRecall {
			return
		}
		if _, err := p.own.Exec(p.live, `select pg_catalog.pg_notify($1, $2)`, p.channel(), of); err != nil {
			p.report(failed("recall", err))
		}
	})
}

// recallEvery bounds how often a process asks for recalls of a scope.
const recallEvery = 20 * time.Millisecond

// recalled calls give with each slot of a scope.
func (p *Pool) recalled(of string, give func(*slot)) {
	for _, slots := range []*sync.Map{&p.rows, &p.memory} {
		if found, ok := slots.Load(of); ok {
			for _, s := range *found.(*scope).slots.Load() {
				give(s)
			}
		}
	}
}

func (p *Pool) channel() string {
	name := "metered_leases_" + p.schema.String()
	return name[:min(len(name), listen.MaxNameBytes)]
}

// listen gives back slices that other processes recall.
func (p *Pool) listen(ctx context.Context) {
	_ = listen.Run(ctx, listen.Channel[string]{
		Name: p.channel(), Config: p.db.Config(), Idle: listen.DefaultIdle,
		OnError: listen.Wrapped("leases", p.cfg.OnError),
		Parse:   func(payload string) (string, bool) { return payload, payload != "" },
	}, func(_ context.Context, scope string) error {
		if scope != "" {
			p.recalled(scope, func(s *slot) { s.notice(p, time.Now()) })
		}
		return nil
	})
}
