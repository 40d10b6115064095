package ledger

import "sync"

// Spans are the periods that the server told of last, by the rule that they follow. A period that
// is known spares a call the search for it. The server compares it with its own clock, so that one
// that is over only sends a call the full way. The zero value knows none.
type Spans struct {
	mu    sync.Mutex
	known map[Period]span
}

// span is a period as a window: from the microsecond after since up to until, in microseconds since
// 1970. The zero value is none.
type span struct{ since, until int64 }

// mostSpans are the most periods that are kept: each user may have an anchor of their own.
const mostSpans = 10_000

// of returns the period that was told of last, if any was.
func (s *Spans) of(rule Period) span {
	if s == nil {
		return span{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[rule]
}

// learn keeps a period. Beyond the most it forgets all others, which the server tells of again.
func (s *Spans) learn(rule Period, told span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil || len(s.known) >= mostSpans {
		s.known = make(map[Period]span)
	}
	s.known[rule] = told
}

// told keeps the period of an answer of the full functions: that of the limit that was sent the
// short way.
func (c *Charging) told(us []int64) {
	if c == nil || c.Spans == nil || len(us) != 2 || us[0] >= us[1] {
		return
	}
	for i := range c.Charges {
		for _, limit := range c.Charges[i].Limits {
			if !limit.Period.IsZero() {
				c.Spans.learn(limit.Period, span{us[0], us[1]})
				return // it alone was sent
			}
		}
	}
}
