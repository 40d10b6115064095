// Package orders runs pairs and triples of the library's calls in each order of their statements,
// and compares each with a model that knows no SQL.
package orders

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// model is the naive state of one world: sums, and sets of names. Calls run on it one after the
// other.
type model struct {
	scopes   map[string]*sums
	aged     int64             // units of "s" that have left its window
	left     int64             // units of the first charge that can be refunded
	holds    map[string]string // states
	held     map[string]int64  // units of "s" of a hold that is live
	uses     int               // of the token
	sole     int               // live tokens of replace-token
	revoked  int               // tokens
	minted   bool
	replaced bool
	claimed  string          // the holder of the claim
	retired  bool            // the scope "t"
	returned bool            // the units of a sale
	done     map[string]bool // operations, job keys, references
	lots     []lot
	lease    string // "" or a state
	leased   int64  // units of the lease that are spent
	child    string
	ahead    bool // the clock jumped, and is not repaired
	reported bool
	reports  int
	settled  int    // sessions
	wants    int64  // units that each parked job needs
	parked   int    // jobs
	started  int    // jobs whose hold is placed
	resting  int    // jobs whose next attempt may start
	later    int    // jobs whose next attempt is later
	job      string // the state of the first job's hold
}

type sums struct{ spent, refunded, credited, held int64 }

type lot struct {
	ref  string
	ends int
	rest int64
	use  string // what it pays for, "" for everything
}

const limit = 100

func (m *model) use(scope string) int64 {
	s := m.scopes[scope]
	used := s.spent - s.refunded + s.held
	if scope == "s" {
		used -= m.aged
	}
	return used
}

// charge is the effect of a charge with a limit of 100 units an hour.
func (m *model) charge(scope string, amount int64) string {
	if m.ahead && scope == "s" {
		return "budget_clock"
	}
	if m.use(scope)+amount > limit {
		return "budget_exceeded"
	}
	m.scopes[scope].spent += amount
	return ok
}

func (m *model) hold(id string, amount int64) string {
	if m.holds[id] != "" { // the same hold again is the first
		return ok
	}
	if m.ahead {
		return "budget_clock"
	}
	if m.use("s")+amount > limit {
		return "budget_exceeded"
	}
	m.holds[id], m.held[id] = "h", amount
	m.scopes["s"].held += amount
	return ok
}

// end ends a hold, of which so many units are spent.
func (m *model) end(id, state string, spent int64) string {
	switch m.holds[id] {
	case "h":
	case "c":
		return "hold_captured"
	case "r":
		return "hold_released"
	case "x":
		return "hold_expired"
	default:
		return "hold_unknown"
	}
	m.holds[id] = state
	m.scopes["s"].held -= m.held[id]
	m.scopes["s"].spent += spent
	m.lowered()
	return ok
}

// lowered arms the threshold again where the use is below its level by as much.
func (m *model) lowered() {
	if m.use("s") < level-rearm+1 {
		m.reported = false
	}
}

// sessionEnds ends one of the sessions of 10 units.
func (m *model) sessionEnds(spent int64) {
	m.scopes["s"].held -= 10
	m.scopes["s"].spent += spent
	if spent > 0 {
		m.settled++
	}
	m.lowered()
}

// park enqueues a job, which starts if it fits and nobody waits.
func (m *model) park() string {
	switch {
	case m.ahead:
		return "budget_clock"
	case m.parked > 0 || m.use("s")+m.wants > limit:
		m.parked++
	default:
		m.start()
	}
	return ok
}

// parkBurst enqueues a job that takes 30 units of "t" where it would wait for "s". In these orders
// the line of "t" is not looked at.
func (m *model) parkBurst() string {
	if !m.ahead && (m.parked > 0 || m.use("s")+m.wants > limit) && m.use("t")+30 <= limit {
		m.started++
		m.scopes["t"].held += 30
		return ok
	}
	return m.park()
}

func (m *model) start() {
	m.started++
	m.scopes["s"].held += m.wants
}

// release starts the jobs that fit.
func (m *model) release() string {
	m.parked, m.resting = m.parked+m.resting, 0
	for !m.ahead && m.parked > 0 && m.use("s")+m.wants <= limit {
		m.parked--
		m.start()
	}
	return ok
}

// jobEnds ends the hold of the first job, of 20 units.
func (m *model) jobEnds() string {
	if m.job != "h" {
		return "hold_released"
	}
	m.job = "r"
	m.started--
	m.scopes["s"].held -= 20
	m.lowered()
	return ok
}

// jobRests ends it until the job's next attempt. The second time there is nothing to do.
func (m *model) jobRests() string {
	if m.job == "rests" {
		return ok
	}
	said := m.jobEnds()
	if said == ok {
		m.job = "rests"
		m.later++
	}
	return said
}

// revoke ends all tokens.
func (m *model) revoke() {
	m.revoked += min(1, m.uses) + m.sole
	m.uses, m.sole = 0, 0
}

func (m *model) claim(holder string) string {
	if m.claimed == "" {
		m.claimed = holder
	}
	if m.claimed != holder {
		return "claim_taken"
	}
	return ok
}

func (m *model) draw(use string, amount int64) string {
	said := m.take(use, amount)
	if said == ok {
		m.scopes["w"].spent += amount
	}
	return said
}

// take takes units of lots, which are spent or held.
func (m *model) take(use string, amount int64) string {
	available := int64(0)
	for _, l := range m.lots {
		if l.use == "" || l.use == use {
			available += l.rest
		}
	}
	if available < amount {
		return "budget_exceeded"
	}
	slices.SortStableFunc(m.lots, func(a, b lot) int { return a.ends - b.ends })
	for i := range m.lots {
		if m.lots[i].use != "" && m.lots[i].use != use {
			continue
		}
		taken := min(amount, m.lots[i].rest)
		m.lots[i].rest -= taken
		amount -= taken
	}
	return ok
}

// text is the state as both the model and the database tell it.
func (m *model) text() string {
	var b strings.Builder
	for _, name := range []string{"s", "t", "w", "child"} {
		s := m.scopes[name]
		if name == "w" { // its lots say the rest
			fmt.Fprintf(&b, "w spent=%d; ", s.spent)
			continue
		}
		fmt.Fprintf(&b, "%s spent=%d refunded=%d credited=%d held=%d; ", name, s.spent, s.refunded, s.credited, s.held)
	}
	for _, id := range []string{"capture", "due", "place"} {
		fmt.Fprintf(&b, "%s=%s ", id, m.holds[id])
	}
	lots := make(map[string]int64)
	for _, l := range m.lots {
		lots[l.ref] += l.rest
	}
	fmt.Fprintf(&b, "jobs=%d,%d uses=%d revoked=%d lots=%d,%d,%d done=%d lease=%s/%d reports=%d claims=%d", m.started, m.parked+m.resting+m.later, m.uses+m.sole, m.revoked, lots["a"], lots["c"], lots["u"], m.count(), m.lease, m.leased, m.reports, min(1, len(m.claimed)))
	return b.String()
}

func (m *model) count() int {
	n := m.settled
	for _, done := range m.done {
		if done {
			n++
		}
	}
	return n
}

func (m *model) clone() *model {
	c := *m
	c.scopes = make(map[string]*sums, len(m.scopes))
	for name, s := range m.scopes {
		copied := *s
		c.scopes[name] = &copied
	}
	c.holds, c.held, c.done, c.lots = maps.Clone(m.holds), maps.Clone(m.held), maps.Clone(m.done), slices.Clone(m.lots)
	return &c
}
