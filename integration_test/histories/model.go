// Package histories records the calls of many clients and their answers, while connections are cut, processes are killed
// and stopped, and callers leave. Then it looks for an order of the calls, one after the other, that explains all answers.
package histories

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// call is one call of a client about one thing.
type call struct {
	thing  string // a scope, a wallet, a hold, a claim, an operation, a token
	kind   string
	who    string // the caller of a claim, the value of an operation
	amount int64
	limit  int64 // of a charge: the units that may be used at any time
}

// answer is that of a call that took effect, or that was refused.
type answer struct {
	refused bool
	units   int64  // of a reading
	state   string // of a reading, and the result of an operation
}

// state is that of one thing.
type state struct {
	used  int64  // spent units, less refunds and credits
	phase string // of a hold, a claim, an operation, a token
}

// step is the sequential behavior of one thing: whether an answer is right, and the state behind it.
func step(s state, c call, a answer) (bool, state) {
	become := func(phase string) state { return state{s.used, phase} }
	switch c.kind {
	case "charge":
		fits := s.used+c.amount <= c.limit
		if !a.refused {
			s.used += c.amount
		}
		return fits != a.refused, s
	case "leased charge": // units on leases of others can be in its way
		fits := s.used+c.amount <= c.limit
		if !a.refused {
			s.used += c.amount
		}
		return a.refused || fits, s
	case "credit", "refund":
		s.used -= c.amount
		return !a.refused, s
	case "usage":
		return a.units == s.used, s
	case "place":
		if a.refused {
			return s.phase != "", s
		}
		return s.phase == "", become("held")
	case "capture", "release":
		if a.refused {
			return s.phase != "held", s
		}
		return s.phase == "held", become(c.kind + "d")
	case "look":
		return a.state == s.phase, s
	case "claim":
		if a.refused {
			return s.phase != "" && s.phase != c.who, s
		}
		return s.phase == "" || s.phase == c.who, become(c.who)
	case "let go":
		if a.refused {
			return s.phase != c.who, s
		}
		return s.phase == c.who, become("")
	case "do":
		if s.phase == "" {
			return a.state == c.who, become(c.who)
		}
		return a.state == s.phase, s
	case "consume":
		if a.refused {
			return s.phase == "used", s
		}
		return s.phase == "", become("used")
	}
	panic("no such call: " + c.kind)
}

// model is that of porcupine: each thing is judged alone.
var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(s, in, out any) (bool, any) {
		ok, next := step(s.(state), in.(call), out.(answer))
		return ok, next
	},
	Equal: func(a, b any) bool { return a == b },
	DescribeOperation: func(in, out any) string {
		return fmt.Sprintf("%+v: %+v", in, out)
	},
}
