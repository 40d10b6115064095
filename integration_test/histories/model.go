package main

import "time"

// call is one call of a client about one thing.
type call struct {
	Thing  string // a scope, a wallet, a hold, a claim, an operation, a token
	Kind   string
	ID     string // of the row that it writes if it takes effect. A reading has none
	Who    string // the caller of a claim, the value of an operation
	Amount int64
	Limit  int64         // of a charge: the units that may be used at any time
	Seq    int64         // of the charge that a refund is of
	Token  string        // as it is presented
	Leaves time.Duration // the caller leaves so soon, or stays with 0
	Dice   int           // decides the rest: an isolation level, an option
}

// answer is that of a call that took effect, or that was refused.
type answer struct {
	Refused bool
	Units   int64  // of a reading
	State   string // of a reading, and the result of an operation
}

// state is that of one thing.
type state struct {
	used  int64  // spent units, less refunds and credits
	phase string // of a hold, a claim, an operation, a token
}

// step is the sequential behavior of one thing: whether an answer is right, and the state after it.
func step(s state, c call, a answer) (bool, state) {
	become := func(phase string) state { return state{s.used, phase} }
	switch c.Kind {
	case "charge", "command":
		fits := s.used+c.Amount <= c.Limit
		if !a.Refused {
			s.used += c.Amount
		}
		return fits != a.Refused, s
	case "leased charge", "session": // units on leases and holds of others can be in its way
		fits := s.used+c.Amount <= c.Limit
		if !a.Refused {
			s.used += c.Amount
		}
		return a.Refused || fits, s
	case "credit", "refund":
		s.used -= c.Amount
		return !a.Refused, s
	case "usage":
		return a.Units == s.used, s
	case "place":
		if a.Refused {
			return s.phase != "", s
		}
		return s.phase == "", become("held")
	case "capture", "release":
		if a.Refused {
			return s.phase != "held", s
		}
		return s.phase == "held", become(c.Kind + "d")
	case "look":
		return a.State == s.phase, s
	case "claim":
		if a.Refused {
			return s.phase != "" && s.phase != c.Who, s
		}
		return s.phase == "" || s.phase == c.Who, become(c.Who)
	case "let go":
		if a.Refused {
			return s.phase != c.Who, s
		}
		return s.phase == c.Who, become("")
	case "do":
		if s.phase == "" {
			return a.State == c.Who, become(c.Who)
		}
		return a.State == s.phase, s
	case "consume", "redeem":
		if a.Refused {
			return s.phase == "used", s
		}
		return s.phase == "", become("used")
	}
	panic("no such call: " + c.Kind)
}
