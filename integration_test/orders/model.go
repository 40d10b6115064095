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
	due      []lot  // of the wallet in which much is due, after all that
	lease    string // "" or a state
	leased   int64  // units of the lease that are spent
	child    string
	ahead    bool // the clock jumped, and is not repaired
	reported bool
	reports  int
	settled  int    // sessions
	wants    int64  // units of "s" that each job needs that is parked
	jobs     []job  // that wait
	joined   int    // lines
	started  int    // jobs whose hold is placed
	later    int    // jobs whose next attempt is later
	job      string // the state of the hold of a job whose next attempt is later
	failed   string // the same of one whose next attempt may start
	full     bool   // a hold keeps 60 units of "t"
}

// part is what a job needs of a scope.
type part struct {
	scope  string
	amount int64
}

// job is one that waits: the key of its turns, and its choices, each of which stands in a line. One
// whose next attempt may start stands in none, until somebody looks.
type job struct {
	fair    string
	choices []choice
}

type choice struct {
	parts  []part
	line   string
	nth    int  // in the line, by arrival
	passed part // the line that it passed, to wait behind others
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

// fits reports whether there is room for all parts.
func (m *model) fits(parts ...part) bool {
	for _, p := range parts {
		if m.use(p.scope)+p.amount > limit {
			return false
		}
	}
	return true
}

// refuses is the scope that has no room for its part: own, or else the first.
func (m *model) refuses(parts []part, own string) (scope string) {
	for _, p := range parts {
		if !m.fits(p) && (scope == "" || p.scope == own) {
			scope = p.scope
		}
	}
	return scope
}

// waits reports whether a job stands in a line, of another key than fair.
func (m *model) waits(line, fair string) bool {
	return slices.ContainsFunc(m.jobs, func(j job) bool {
		return j.fair != fair && slices.ContainsFunc(j.choices, func(c choice) bool { return c.line == line })
	})
}

func (m *model) start(parts []part) {
	m.started++
	for _, p := range parts {
		m.scopes[p.scope].held += p.amount
	}
}

// park enqueues a job, which starts by the first choice that fits while nobody waits for its scopes.
func (m *model) park(fair string, choices ...[]part) string {
	j := job{fair: fair}
	for _, parts := range choices {
		if m.ahead && slices.ContainsFunc(parts, func(p part) bool { return p.scope == "s" }) {
			return "budget_clock"
		}
		line := m.refuses(parts, "")
		for _, p := range parts {
			if line == "" && m.waits(p.scope, "") {
				line = p.scope
			}
		}
		if line == "" {
			m.start(parts)
			return ok
		}
		m.joined++
		j.choices = append(j.choices, choice{parts: parts, line: line, nth: m.joined})
	}
	m.jobs = append(m.jobs, j)
	return ok
}

// rests has a job wait for its next attempt, which may start.
func (m *model) rests(amount int64) {
	m.jobs = append(m.jobs, job{fair: tenantsOwn, choices: []choice{{parts: []part{{"s", amount}}}}})
}

// tenantsOwn is the key of jobs without Options.FairKey.
const tenantsOwn = "tenant"

// release starts the jobs of a line that fit, in their order. One that another scope refuses moves to
// that scope's line, and one that fits here moves to the line of another scope in which others wait.
func (m *model) release(line string) string {
	for i, j := range m.jobs {
		if c := &j.choices[0]; c.line == "" && c.parts[0].scope == line {
			m.joined++
			c.line, c.nth = line, m.joined
			m.jobs[i] = j
		}
	}
	if m.ahead && line == "s" {
		return ok
	}
	least := int64(limit + 1) // the least that was refused
	all := m.inLine(line)
	if len(all) > 0 && !m.fits(part{line, slices.MinFunc(all, func(a, b standing) int { return int(a.own - b.own) }).own}) {
		return ok
	}
	for _, at := range all {
		i := slices.IndexFunc(m.jobs, func(j job) bool {
			return slices.ContainsFunc(j.choices, func(c choice) bool { return c.nth == at.nth })
		})
		if i < 0 || at.own >= least {
			continue
		}
		j := m.jobs[i]
		n := slices.IndexFunc(j.choices, func(c choice) bool { return c.nth == at.nth })
		c := &j.choices[n]
		if n > 0 && m.fits(j.choices[0].parts...) {
			c = &j.choices[0]
		} else if onward := m.before(*c, j.fair); onward != "" {
			if !m.fits(part{line, at.own + m.passing(line)}) {
				least = min(least, at.own)
				continue
			}
			m.joined++
			c.line, c.nth, c.passed = onward, m.joined, part{line, at.own}
			continue
		}
		switch scope := m.refuses(c.parts, line); scope {
		case "":
			m.start(c.parts)
			m.jobs = slices.Delete(m.jobs, i, i+1)
		case line:
			least = min(least, at.own)
		default:
			m.joined++
			c.line, c.nth, c.passed = scope, m.joined, part{}
		}
	}
	return ok
}

// standing is a place in a line.
type standing struct {
	nth int
	own int64 // units of the line's scope
}

// inLine are the places of a line, in order.
func (m *model) inLine(line string) (all []standing) {
	for _, j := range m.jobs {
		for _, c := range j.choices {
			if c.line == line {
				i := slices.IndexFunc(c.parts, func(p part) bool { return p.scope == line })
				all = append(all, standing{c.nth, c.parts[i].amount})
			}
		}
	}
	slices.SortFunc(all, func(a, b standing) int { return a.nth - b.nth })
	return all
}

// before is the scope whose line a choice joins before it starts, since others wait there.
func (m *model) before(c choice, fair string) string {
	behind := false
	for _, p := range c.parts {
		switch {
		case p.scope == c.line:
			behind = true
		case p.scope != c.passed.scope && m.waits(p.scope, fair) && (behind || !m.waits(c.line, fair)):
			return p.scope
		}
	}
	return ""
}

// passing are units of jobs that passed a line.
func (m *model) passing(line string) (units int64) {
	for _, j := range m.jobs {
		for _, c := range j.choices {
			if c.passed.scope == line {
				units += c.passed.amount
			}
		}
	}
	return units
}

// jobEnds ends the hold of one of two jobs, of 20 units, if it is its state.
func (m *model) jobEnds(state *string) string {
	if *state != "h" {
		return "hold_released"
	}
	*state = "r"
	m.started--
	m.scopes["s"].held -= 20
	m.lowered()
	return ok
}

// jobRests ends it until the job's next attempt, which is later or may start. The second time there is
// nothing to do.
func (m *model) jobRests(state *string, later bool) string {
	if *state == "rests" {
		return ok
	}
	said := m.jobEnds(state)
	if said != ok {
		return said
	}
	if *state = "rests"; later {
		m.later++
	} else {
		m.rests(20)
	}
	return ok
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
func (m *model) take(use string, amount int64) string { return take(m.lots, use, amount) }

func take(lots []lot, use string, amount int64) string {
	available := int64(0)
	for _, l := range lots {
		if l.use == "" || l.use == use {
			available += l.rest
		}
	}
	if available < amount {
		return "budget_exceeded"
	}
	slices.SortStableFunc(lots, func(a, b lot) int { return a.ends - b.ends })
	for i := range lots {
		if lots[i].use != "" && lots[i].use != use {
			continue
		}
		taken := min(amount, lots[i].rest)
		lots[i].rest -= taken
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
	fmt.Fprintf(&b, "jobs=%d,%d uses=%d revoked=%d lots=%d,%d,%d done=%d lease=%s/%d reports=%d claims=%d", m.started, len(m.jobs)+m.later, m.uses+m.sole, m.revoked, lots["a"], lots["c"], lots["u"], m.count(), m.lease, m.leased, m.reports, min(1, len(m.claimed)))
	if m.due != nil {
		b.WriteString(dueText(m.due))
	}
	if p := m.scopes["p"]; p != nil {
		b.WriteString(pileText(p.spent, p.held))
	}
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
	c.jobs = make([]job, len(m.jobs))
	for i, j := range m.jobs {
		c.jobs[i] = job{j.fair, slices.Clone(j.choices)}
	}
	c.holds, c.held, c.done, c.lots = maps.Clone(m.holds), maps.Clone(m.held), maps.Clone(m.done), slices.Clone(m.lots)
	c.due = slices.Clone(m.due)
	return &c
}
