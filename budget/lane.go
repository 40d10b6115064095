package budget

import (
	"cmp"
	"context"
	"errors"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/observe"
)

// lane commits batches one after the other. Its fields are guarded by Batcher.mu.
type lane struct {
	batcher *Batcher
	waits   bool // for locks of others: scopes that the other lanes found busy come here
	queue   []*call
	running bool
}

// add queues a call, and begins to run if the lane is idle. Batcher.mu is held.
func (l *lane) add(c *call) {
	l.queue = append(l.queue, c)
	if !l.running {
		l.running = true
		l.batcher.running.Add(1)
		go l.run()
	}
}

func (l *lane) run() {
	defer l.batcher.running.Done()
	for {
		batch := l.take()
		if batch == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), l.batcher.cfg.Timeout)
		l.commit(ctx, batch, l.waits)
		cancel()
	}
}

// take returns the next batch, or nil to end the run.
func (l *lane) take() []*call {
	b := l.batcher
	b.mu.Lock()
	defer b.mu.Unlock()
	var batch []*call
	n := 0
	for ; n < len(l.queue) && len(batch) < b.cfg.MaxBatch; n++ {
		if c := l.queue[n]; !c.gone {
			c.taken = true
			batch = append(batch, c)
		}
	}
	if l.queue = l.queue[n:]; len(l.queue) == 0 {
		l.queue = nil // or its largest size would stay
	}
	l.running = batch != nil
	return batch
}

// commit makes the charges of a batch, and answers each. Without wait, those whose scope is locked
// go to the lane that waits.
func (l *lane) commit(ctx context.Context, batch []*call, wait bool) {
	lost := false
	err := pause.Loop("budget", func(n int) (again context.Context, err error) {
		results, err := l.send(ctx, batch, !wait)
		if err == nil {
			l.answer(batch, results)
			return nil, nil
		}
		if errors.Is(err, ErrCommitUnknown) {
			l.tellLost(ctx, batch)
			// Events can be asked for again: their ids wait for the lost transaction to end.
			if batch = loseAll(batch, err); len(batch) == 0 {
				return nil, nil
			}
			lost = true
		}
		busy := errors.Is(err, ErrBusy)
		switch {
		case busy && !l.waits:
			l.pass(batch)
			return nil, nil
		case busy && wait:
			wait = false // scopes that are free by now are charged, and the rest is busy
		case splits(err) && len(batch) > 1:
			l.commit(ctx, batch[:len(batch)/2], wait)
			l.commit(ctx, batch[len(batch)/2:], wait)
			return nil, nil
		case !lost && (!sqlstate.Collided(err) || n >= maxAttempts):
			return nil, err
		}
		if sqlstate.Collided(err) {
			l.batcher.ledger.observer.Retried(ctx, err)
		}
		return ctx, err
	})
	if err != nil {
		failAll(batch, err)
	}
}

// splits reports whether halves of a batch may get through that as a whole does not: a charge that
// the server cannot store, a time zone that it does not know, too many locks, or a threshold that
// could not be reported.
func splits(err error) bool {
	state := sqlstate.Of(err)
	if untold := (*fault.Listener)(nil); errors.As(err, &untold) {
		return !sqlstate.Collided(err)
	}
	return sqlstate.Class(state) == "22" || state == sqlstate.OutOfMemory ||
		state == sqlstate.UnknownZone || state == sqlstate.Thresholds
}

func (l *lane) send(ctx context.Context, batch []*call, skipBusy bool) (results []Result, err error) {
	ctx, span := l.batcher.ledger.observer.Start(ctx, observe.Op{Work: observe.Batch})
	defer func() { l.tellSent(ctx, span, results, err) }()
	items := make([]*item, len(batch))
	for i, c := range batch {
		items[i] = c.item
	}
	b := l.batcher
	err = sweep.Through(ctx, b.pool, b.ledger.schema, b.ledger.wait, func() error {
		return b.ledger.alone(ctx, b.pool, func(db Querier, telling bool) (crossed []Crossing, err error) {
			results, err = b.ledger.eachOnce(ctx, db, items, skipBusy, telling)
			for _, r := range results {
				crossed = append(crossed, r.Crossed...)
			}
			return crossed, err
		})
	})
	return results, err
}

// tellSent reports a transaction to the observer.
func (l *lane) tellSent(ctx context.Context, span observed.Span, results []Result, err error) {
	var made int64
	for _, r := range results {
		if r.Err == nil && !r.Posted.Replayed {
			made++
		}
	}
	l.batcher.ledger.tellResults(ctx, results)
	span.With(observe.End{Err: err, Rows: made})
}

// tellLost reports the calls whose COMMIT is newly lost: nobody looks for the charges among them.
func (l *lane) tellLost(ctx context.Context, batch []*call) {
	to := l.batcher.ledger.observer
	if to == nil {
		return
	}
	for _, c := range batch {
		if c.lost == nil {
			c.to = to
			to.Lost(ctx, 1)
		}
	}
}

// answer gives each call of a batch its result.
func (l *lane) answer(batch []*call, results []Result) {
	var busy []*call
	for i, c := range batch {
		if !l.waits && errors.Is(results[i].Err, ErrBusy) {
			busy = append(busy, c)
			continue
		}
		c.finish(results[i])
	}
	l.pass(busy)
}

// pass hands calls on to the lane that waits for locks. Their callers can leave again.
func (l *lane) pass(busy []*call) {
	b := l.batcher
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range busy {
		c.taken = false
		b.lanes[len(b.lanes)-1].add(c)
	}
}

// loseAll takes note that the outcome of a batch is open. It answers the charges without an id, and
// returns the events.
func loseAll(batch []*call, err error) (events []*call) {
	for _, c := range batch {
		if c.lost = err; c.event == nil {
			c.finish(Result{Err: err})
		} else {
			events = append(events, c)
		}
	}
	return events
}

func failAll(batch []*call, err error) {
	for _, c := range batch {
		c.finish(Result{Err: cmp.Or(c.lost, err)})
	}
}

func (c *call) finish(r Result) {
	if c.lost != nil && errors.Is(r.Err, ErrBusy) {
		r.Err = c.lost // the lost transaction may have the lock
	}
	if c.lost != nil {
		c.to.Resolved(context.Background(), c.became(r))
	}
	c.result = r
	close(c.done)
}

// became is the outcome of a lost COMMIT, by the answer that was found.
func (c *call) became(r Result) string {
	switch {
	case errors.Is(r.Err, ErrCommitUnknown):
		return observed.Unknown
	case r.Err == nil && r.Posted.Replayed:
		return observed.Committed
	}
	return observed.NotCommitted
}
