// Package interleave runs a few transactions of Postgres in each order of their statements, also of
// those inside functions.
//
// Gated puts a gate before each statement of a schema's functions, for a test's database. An
// Explorer opens one gate at a time, so one session runs at a time, from a gate to its next gate,
// until it has to wait for another session's lock, or until its call has ended. Explore walks the
// orders depth first, with a bound on preemptions: a preemption is a switch away from a session
// that could have gone on. The package knows nothing of the schema that it explores.
package interleave

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A Call is one transaction or more, on a pool of one connection. Its context ends only with the
// exploration.
type Call func(ctx context.Context, pool *pgxpool.Pool) error

// Order names the session of each step. It is printed and parsed as "0.0.1".
type Order []int

func (o Order) String() string {
	text := make([]string, len(o))
	for i, s := range o {
		text[i] = strconv.Itoa(s)
	}
	return strings.Join(text, ".")
}

// ParseOrder reads the text of an Order.
func ParseOrder(text string) (o Order, err error) {
	for part := range strings.SplitSeq(text, ".") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("interleave: order %q: want numbers of sessions with dots between them", text)
		}
		o = append(o, n)
	}
	return o, nil
}

// Run is one order that was run.
type Run struct {
	Order  Order    // as far as a choice was left: Run goes on from there in the same way
	Steps  []string // each step, as "session: gate", or some steps that were taken at once
	Errs   []error  // of each call
	Ended  []int    // the sessions in the order in which their calls ended
	choice []choice
	server []bool // whether the step was a gate inside a function
	spent  int    // preemptions
}

// choice is a point of a run at which more than one session could go on.
type choice struct {
	could []int
	took  int
	last  int // the session of the step before, or -1
}

// Explorer runs calls on sessions of its own.
type Explorer struct {
	control  *pgx.Conn
	sessions []*session
}

// hang is how long all sessions may do nothing.
const hang = 5 * time.Minute

// New opens n sessions on a database that was installed by Install.
func New(ctx context.Context, config *pgxpool.Config, n int) (*Explorer, error) {
	e := &Explorer{}
	var err error
	if e.control, err = pgx.ConnectConfig(ctx, config.ConnConfig.Copy()); err != nil {
		return nil, err
	}
	for i := range n {
		s := &session{key: 1_000_000 + i}
		e.sessions = append(e.sessions, s)
		if _, err := e.control.Exec(ctx, "select pg_catalog.pg_advisory_lock($1, 0), pg_catalog.pg_advisory_lock($1, 1)", s.key); err != nil {
			return nil, err
		}
		if err := s.open(ctx, config); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// Install makes the gates that a gated script calls. Run it before the script.
func Install(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, gatesSQL, pgx.QueryExecModeSimpleProtocol)
	return err
}

// Pool is the pool of a session, for objects that calls need.
func (e *Explorer) Pool(session int) *pgxpool.Pool { return e.sessions[session].pool }

// Close ends the sessions, also those that an error has left at a gate.
func (e *Explorer) Close(ctx context.Context) {
	for _, s := range e.sessions {
		if s.pool != nil {
			_, _ = e.control.Exec(ctx, "select pg_catalog.pg_terminate_backend($1)", int32(s.pid))
			s.pool.Close()
		}
	}
	_ = e.control.Close(ctx)
}

// Run runs one call in each session. It follows the order, and where that has ended it goes on with
// the session that ran last, as long as that can, and then with the first that can.
func (e *Explorer) Run(ctx context.Context, order Order, calls []Call) (*Run, error) {
	return e.run(ctx, plan{order: order, most: math.MaxInt}, calls)
}

// plan is an order to follow, and the most preemptions. server says which gates of the order are
// inside functions, as far as an earlier run has shown.
type plan struct {
	order  Order
	server []bool
	most   int
	steps  []string // of that run
}

// then counts the gates that the session of a step opens next.
func (p plan) then(step int) (g gates) {
	for i := step + 1; i < len(p.server) && p.order[i] == p.order[step]; i++ {
		if p.server[i] {
			g.server++
		} else {
			g.client++
		}
	}
	return g
}

func (e *Explorer) run(ctx context.Context, p plan, calls []Call) (*Run, error) {
	r := &Run{Errs: make([]error, len(calls))}
	all := e.sessions[:len(calls)]
	if err := e.shut(ctx); err != nil {
		return r, err
	}
	for i, s := range all {
		s.start(ctx, calls[i])
		if err := e.settle(ctx, all, s, r); err != nil {
			return r, err
		}
	}
	var diverged error
	for c := (choice{last: -1}); ; c.last = c.took {
		var open int
		if c.could, open = ready(all); open == 0 {
			return r, diverged
		}
		if len(c.could) == 0 { // a deadlock: Postgres ends one of them
			c.took = c.last
			if err := e.await(ctx, all, nil, r); err != nil {
				return r, err
			}
			continue
		}
		step := len(r.Order)
		if step < len(p.order) && !slices.Contains(c.could, p.order[step]) {
			diverged = fmt.Errorf("interleave: step %d of order %s: session %d cannot go on: %w: %q, and before %q", step, p.order, p.order[step], ErrDiverged, r.Steps, p.steps)
			p.order = p.order[:step]
		}
		switch {
		case step < len(p.order):
			c.took = p.order[step]
		case slices.Contains(c.could, c.last):
			c.took = c.last
		default:
			c.took = c.could[0]
		}
		r.spent += preempts(c, c.took)
		// While no session is blocked, one may pass many gates at once. Another's lock is free
		// where a statement of the client ends.
		var ahead gates
		alone := len(c.could) == open
		switch {
		case step < len(p.order) && alone:
			ahead = p.then(step)
		case step < len(p.order) || r.spent < p.most:
		case alone:
			ahead = gates{every, every}
		default:
			ahead = gates{0, every}
		}
		if err := e.pass(ctx, all, c, ahead, r); err != nil {
			return r, err
		}
	}
}

// ready are the sessions at a gate, and open is how many calls have not ended.
func ready(all []*session) (could []int, open int) {
	for i, s := range all {
		if s.state == waiting {
			could = append(could, i)
		}
		if s.state != ended {
			open++
		}
	}
	return could, open
}

// pass lets the session of a choice pass its gate and those ahead, and notes them.
func (e *Explorer) pass(ctx context.Context, all []*session, c choice, ahead gates, r *Run) error {
	s := all[c.took]
	server, step := s.server, fmt.Sprintf("%d: %s", c.took, s.at)
	if err := e.open(ctx, s, ahead); err != nil {
		return err
	}
	if err := e.settle(ctx, all, s, r); err != nil {
		return err
	}
	if ahead.server == every {
		if len(all) == 2 { // no choice is left
			return nil
		}
		var err error
		if ahead, err = e.shutAhead(ctx, s, ahead); err != nil {
			return err
		}
	}
	r.note(c, server, step)
	for i := range ahead.client + ahead.server {
		r.note(choice{[]int{c.took}, c.took, c.took}, i >= ahead.client, "")
	}
	return nil
}

func (r *Run) note(c choice, server bool, step string) {
	r.choice = append(r.choice, c)
	r.Order = append(r.Order, c.took)
	r.server = append(r.server, server)
	if step != "" {
		r.Steps = append(r.Steps, step)
	}
}

// ErrDiverged is that of an order which could not be followed, since the calls did not do the same
// as before.
var ErrDiverged = errors.New("the calls took another way")

// Open opens every gate, until the next run.
func (e *Explorer) Open(ctx context.Context) error {
	var sql strings.Builder
	for _, s := range e.sessions {
		fmt.Fprintf(&sql, "select pg_catalog.setval('gates.ahead%d', %d);", s.key, every)
	}
	_, err := e.control.Exec(ctx, sql.String(), pgx.QueryExecModeSimpleProtocol)
	return err
}

// shut shuts the gates that an earlier run has left open.
func (e *Explorer) shut(ctx context.Context) error {
	var sql strings.Builder
	for _, s := range e.sessions {
		fmt.Fprintf(&sql, "select pg_catalog.setval('gates.reached%[1]d', 1, false), pg_catalog.setval('gates.ahead%[1]d', 0);", s.key)
	}
	_, err := e.control.Exec(ctx, sql.String(), pgx.QueryExecModeSimpleProtocol)
	return err
}

// open lets a session pass the gate at which it waits, and so many after it.
func (e *Explorer) open(ctx context.Context, s *session, ahead gates) (err error) {
	s.state = running
	s.ahead.Store(ahead.client)
	if s.server {
		s.passed++
	}
	var sql []string
	if s.server && s.waits > 0 { // the lock of the gate before is free again: the session is past it
		sql = append(sql, fmt.Sprintf("pg_catalog.pg_advisory_lock(%d, %d)", s.key, 1-s.waits&1))
	}
	if ahead.server > 0 {
		sql = append(sql, fmt.Sprintf("pg_catalog.setval('gates.ahead%d', %d)", s.key, s.passed+ahead.server))
	}
	if s.server {
		sql = append(sql, fmt.Sprintf("pg_catalog.pg_advisory_unlock(%d, %d)", s.key, s.waits&1))
		s.waits++
	}
	if len(sql) > 0 {
		_, err = e.control.Exec(ctx, "select "+strings.Join(sql, ", "), pgx.QueryExecModeSimpleProtocol)
	}
	if ahead.server < every {
		s.passed += ahead.server
	}
	if !s.server && err == nil {
		s.resume <- struct{}{}
	}
	return err
}

// shutAhead shuts the gates before a session that was free to pass every one, and counts those that
// it has passed.
func (e *Explorer) shutAhead(ctx context.Context, s *session, ahead gates) (gates, error) {
	if ahead.client == every {
		ahead.client -= max(0, s.ahead.Swap(0))
	}
	before := s.passed
	sql := fmt.Sprintf("select pg_catalog.setval('gates.ahead%[1]d', coalesce(pg_catalog.pg_sequence_last_value('gates.reached%[1]d'), 0))", s.key)
	err := e.control.QueryRow(ctx, sql, pgx.QueryExecModeSimpleProtocol).Scan(&s.passed)
	ahead.server = s.passed - before
	return ahead, err
}

// settle waits until s is at a gate, blocked or ended, and the sessions that it has set free, too.
func (e *Explorer) settle(ctx context.Context, all []*session, s *session, r *Run) error {
	if err := e.await(ctx, all, s, r); err != nil {
		return err
	}
	return e.settleOthers(ctx, all, s, r)
}

// settleOthers waits until the blocked sessions but s are still blocked, or at a gate, or ended.
func (e *Explorer) settleOthers(ctx context.Context, all []*session, s *session, r *Run) error {
	for _, other := range all {
		if other.state == blocked && other != s {
			if err := e.await(ctx, all, other, r); err != nil {
				return err
			}
		}
	}
	return nil
}

// await waits for an event of s, or until s is blocked. Without s it waits for an event of any
// session.
func (e *Explorer) await(ctx context.Context, all []*session, s *session, r *Run) error {
	began := time.Now()
	pause := 500 * time.Microsecond // most steps have ended by then, and need no look at the locks
	for {
		if s != nil {
			select {
			case ev := <-s.events:
				e.note(all, s, ev, r)
				return nil
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(pause):
			}
			var by []uint32
			if err := e.control.QueryRow(ctx, "select pg_catalog.pg_blocking_pids($1)::int8[]", int32(s.pid)).Scan(&by); err != nil {
				return err
			}
			waits := slices.ContainsFunc(all, func(other *session) bool { return slices.Contains(by, other.pid) })
			if waits && len(s.events) == 0 {
				s.state = blocked
				return nil
			}
		} else {
			for _, other := range all {
				select {
				case ev := <-other.events:
					e.note(all, other, ev, r)
					return e.settleOthers(ctx, all, other, r)
				default:
				}
			}
			time.Sleep(pause)
		}
		if time.Since(began) > hang {
			return fmt.Errorf("interleave: no session goes on after %s: %s", r.Order, e.doing(ctx, all))
		}
		pause = min(2*pause, 10*time.Millisecond)
	}
}

// doing says what each session does.
func (e *Explorer) doing(ctx context.Context, all []*session) string {
	var text strings.Builder
	for i, s := range all {
		var does string
		err := e.control.QueryRow(ctx, `select concat_ws(' ', a.state, a.wait_event_type, a.wait_event, 'blocked by', pg_catalog.pg_blocking_pids($1), 'in', a.query)
			from pg_catalog.pg_stat_activity a where a.pid = $1`, int32(s.pid)).Scan(&does)
		fmt.Fprintf(&text, "\nsession %d (pid %d) in state %d, at %q: %s %v", i, s.pid, s.state, s.at, does, err)
	}
	return text.String()
}

func (e *Explorer) note(all []*session, s *session, ev event, r *Run) {
	if ev.done {
		i := slices.Index(all, s)
		s.state, r.Errs[i] = ended, ev.err
		r.Ended = append(r.Ended, i)
		return
	}
	s.state, s.at, s.server = waiting, ev.place, ev.server
}

// Explore runs the calls that setup makes, in each order with at most so many preemptions, until
// visit says no. setup makes the calls for each run anew, on data of their own. It returns how many
// orders were run. An order that a run did not follow is run again, a few times.
func (e *Explorer) Explore(ctx context.Context, preemptions int, setup func(n int) ([]Call, error), visit func(n int, r *Run) (bool, error)) (int, error) {
	stack := []plan{{most: preemptions}}
	again := 0
	for n := 0; ; n++ {
		if len(stack) == 0 {
			return n, nil
		}
		p := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		calls, err := setup(n)
		if err != nil {
			return n, err
		}
		r, err := e.run(ctx, p, calls)
		if errors.Is(err, ErrDiverged) && again < 5 {
			again++
			n--
			stack = append(stack, p)
			continue
		}
		if err != nil {
			return n, err
		}
		again = 0
		if more, err := visit(n, r); err != nil || !more {
			return n + 1, err
		}
		spent := 0
		for i, c := range r.choice {
			for _, other := range c.could {
				if i < len(p.order) || other == c.took {
					continue
				}
				if cost := spent + preempts(c, other); cost <= preemptions {
					stack = append(stack, plan{append(slices.Clone(r.Order[:i]), other), slices.Clone(r.server[:i]), preemptions, r.Steps})
				}
			}
			spent += preempts(c, c.took)
		}
	}
}

// preempts is 1 where next takes the turn of a session that could have gone on.
func preempts(c choice, next int) int {
	if c.last >= 0 && c.last != next && slices.Contains(c.could, c.last) {
		return 1
	}
	return 0
}
