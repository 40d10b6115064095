package jobs_test

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestMain(m *testing.M) {
	pgtest.Histories(15, 400)
	os.Exit(m.Run())
}

// need is what a job needs of a scope: units that are held until it ends, or, if spent, that are charged when it starts.
type need struct {
	scope  string
	amount int64
	spent  bool
}

type modelJob struct {
	id       int64
	needs    []need
	second   []need // where needs do not fit: then needs are these
	first    []need
	priority int
	fair     string
	turn     int64 // of a job in the only line
	state    string
	gives    bool      // its units back when it fails
	next     time.Time // its next attempt
}

// use is so many units of a scope that were charged at a time, or that are held for a job.
type use struct {
	scope  string
	amount int64
	at     time.Time
	job    int64 // 0: charged
}

// model is a list of jobs and of uses, and a limit of each scope. It knows no SQL.
type model struct {
	most   map[string]int64
	window map[string]time.Duration // 0: lifetime
	uses   []use
	jobs   []*modelJob
	now    time.Time
	turns  map[int]int64 // of the only line, by priority: the last that was released
}

func (m *model) used(scope string) (sum int64) {
	for _, u := range m.uses {
		if u.scope == scope && (u.job != 0 || m.window[scope] == 0 || u.at.After(m.now.Add(-m.window[scope]))) {
			sum += u.amount
		}
	}
	return sum
}

func (m *model) fits(needs []need) bool {
	for _, n := range needs {
		if m.used(n.scope)+n.amount > m.most[n.scope] {
			return false
		}
	}
	return true
}

// startable reports whether a job can start, by either choice.
func (m *model) startable(j *modelJob) bool {
	return m.fits(j.needs) || j.second != nil && m.fits(j.second)
}

func (m *model) start(j *modelJob) {
	j.state = "started"
	for _, n := range j.needs {
		u := use{n.scope, n.amount, m.now, j.id}
		if n.spent {
			u.job = 0
		}
		m.uses = append(m.uses, u)
	}
	m.turns[j.priority] = max(m.turns[j.priority], j.turn)
}

// end frees what a job holds, and charges the first of it with so many units.
func (m *model) end(j *modelJob, cost int64) {
	j.state = "ended"
	for _, n := range j.needs {
		if !n.spent && cost > 0 {
			m.uses = append(m.uses, use{n.scope, cost, m.now, 0})
			cost = 0
		}
	}
	m.uses = slices.DeleteFunc(m.uses, func(u use) bool { return u.job == j.id })
}

// parked are the jobs that wait, in the order of the only line.
func (m *model) parked() (all []*modelJob) {
	for _, j := range m.jobs {
		if j.state == "parked" {
			all = append(all, j)
		}
	}
	slices.SortFunc(all, func(a, b *modelJob) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.turn, b.turn), cmp.Compare(a.id, b.id))
	})
	return all
}

// line gives a job its turn in the only line.
func (m *model) line(j *modelJob) {
	if len(m.parked()) == 0 {
		m.turns = map[int]int64{}
	}
	j.turn = m.turns[j.priority]
	for _, other := range m.parked() {
		if other != j && other.priority == j.priority && other.fair == j.fair {
			j.turn = max(j.turn, other.turn)
		}
	}
	j.turn++
}

// rested puts the jobs in line that may be tried again by now.
func (m *model) rested() {
	var due []*modelJob
	for _, j := range m.jobs {
		if j.state == "resting" && !j.next.After(m.now) {
			due = append(due, j)
		}
	}
	slices.SortStableFunc(due, func(a, b *modelJob) int { return a.next.Compare(b.next) })
	for _, j := range due {
		m.line(j)
		j.state = "parked"
	}
}

// history runs the model beside the database.
type history struct {
	*rapid.T
	g      *gated
	clock  *pgtest.Clock
	m      *model
	scopes []string
	before int64 // the last hold of other histories
}

func (h *history) level() pgx.TxIsoLevel {
	return rapid.SampledFrom(isolationLevels).Draw(h.T, "level")
}

func (h *history) limit(scope string) []budget.Limit {
	if w := h.m.window[scope]; w > 0 {
		return []budget.Limit{budget.PerWindow(h.m.most[scope], w)}
	}
	return []budget.Limit{budget.Lifetime(h.m.most[scope])}
}

func (h *history) pick(state string) *modelJob {
	var all []*modelJob
	for _, j := range h.m.jobs {
		if j.state == state {
			all = append(all, j)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return rapid.SampledFrom(all).Draw(h.T, state)
}

func (h *history) enqueue() {
	j := &modelJob{priority: rapid.IntRange(1, 3).Draw(h.T, "priority"), fair: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(h.T, "fair")}
	o := &jobs.Options{FairKey: j.fair, Hold: &jobs.Units{}}
	o.InsertOpts.Priority = j.priority
	for _, scope := range rapid.Permutation(h.scopes).Draw(h.T, "scopes")[:rapid.IntRange(1, len(h.scopes)).Draw(h.T, "n")] {
		n := need{scope, rapid.Int64Range(1, h.m.most[scope]).Draw(h.T, "amount"), h.m.window[scope] > 0 && rapid.Bool().Draw(h.T, "spent")}
		j.needs = append(j.needs, n)
		if n.spent {
			o.Hold.Charges = append(o.Hold.Charges, budget.Charge{Scope: scope, Amount: n.amount, Limits: h.limit(scope)})
		} else {
			o.Hold.Lines = append(o.Hold.Lines, holds.Line{Scope: scope, Amount: n.amount, Limits: h.limit(scope)})
		}
	}
	if len(h.scopes) > 1 && len(o.Hold.Charges) == 0 && rapid.Bool().Draw(h.T, "burst") {
		h.second(j, o)
	}
	j.gives = len(o.Hold.Lines) > 0 && rapid.Bool().Draw(h.T, "gives")
	o.GiveBack = j.gives
	j.first = j.needs
	// Somebody may wait for one of its scopes already.
	starts := !h.waits(j.needs) && h.m.fits(j.needs)
	if j.second != nil && !starts && !h.waits(j.second) && h.m.fits(j.second) {
		starts, j.needs = true, j.second
	}
	var result jobs.Result
	h.g.in(h.level(), func(tx pgx.Tx) (err error) {
		result, err = h.g.Enqueue(h.g.ctx, tx, process{"x"}, o)
		return err
	})
	j.id = result.JobID
	require.Equal(h.T, !starts, result.Parked)
	if starts && j.second != nil {
		require.Equal(h.T, asLines(j.needs), h.held(j.id))
	}
	if result.Parked {
		h.m.line(j)
		j.state = "parked"
	} else {
		h.m.start(j)
	}
	h.m.jobs = append(h.m.jobs, j)
}

func (h *history) waits(needs []need) bool {
	return slices.ContainsFunc(needs, func(n need) bool {
		return pgtest.Value[bool](h.g.t, h.g.pool, "select exists (select from metered.parked_scopes where scope = $1)", n.scope)
	})
}

// second gives a job another choice of units: of other scopes, or of other amounts.
func (h *history) second(j *modelJob, o *jobs.Options) {
	var second []need
	burst := &jobs.Units{}
	for _, scope := range rapid.Permutation(h.scopes).Draw(h.T, "second scopes")[:rapid.IntRange(1, len(h.scopes)).Draw(h.T, "m")] {
		n := need{scope, rapid.Int64Range(1, h.m.most[scope]).Draw(h.T, "second amount"), false}
		second = append(second, n)
		burst.Lines = append(burst.Lines, holds.Line{Scope: scope, Amount: n.amount, Limits: h.limit(scope)})
	}
	if asLines(second) != asLines(j.needs) {
		j.second, o.Burst = second, burst
	}
}

func asLines(needs []need) string {
	var all []string
	for _, n := range needs {
		all = append(all, fmt.Sprint(n.scope, " ", n.amount))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// held are the lines of a job's hold.
func (h *history) held(id int64) string {
	return pgtest.Value[string](h.g.t, h.g.pool, `select string_agg(l.scope || ' ' || l.amount, ', ' order by l.scope collate "C", l.amount)
		from metered.holds h join metered.hold_lines l on l.hold = h.no where h.id = $1`, jobs.Of(h.g.job(id)).Hold)
}

// charge is a request that shares the budget with the jobs.
func (h *history) charge() {
	scope := rapid.SampledFrom(h.scopes).Draw(h.T, "scope")
	n := []need{{scope, rapid.Int64Range(1, h.m.most[scope]).Draw(h.T, "amount"), true}}
	err := pgtest.Retried(h.g.ctx, h.g.pool, h.level(), func(tx pgx.Tx) error {
		_, err := h.g.ledger.Charge(h.g.ctx, tx, budget.Charge{Scope: scope, Amount: n[0].amount, Limits: h.limit(scope)})
		return err
	})
	if !h.m.fits(n) {
		require.ErrorIs(h.T, err, budget.ErrExceeded)
		return
	}
	require.NoError(h.T, err)
	h.m.uses = append(h.m.uses, use{scope, n[0].amount, h.m.now, 0})
}

func (h *history) credit() {
	scope := rapid.SampledFrom(h.scopes).Draw(h.T, "scope")
	if h.m.window[scope] > 0 {
		return // credit counts for lifetime limits alone
	}
	amount := rapid.Int64Range(1, 3).Draw(h.T, "amount")
	h.g.in(h.level(), func(tx pgx.Tx) error {
		_, err := h.g.ledger.Credit(h.g.ctx, tx, budget.Credit{Scope: scope, Amount: amount})
		return err
	})
	h.m.uses = append(h.m.uses, use{scope, -amount, h.m.now, 0})
}

// end ends a job: by River's own statement, by a row that is gone, or by a worker that captures its cost.
func (h *history) end() {
	j := h.pick("started")
	if j == nil {
		return
	}
	var held int64
	for _, n := range j.needs {
		if !n.spent && held == 0 {
			held = n.amount
		}
	}
	how := rapid.IntRange(0, 2).Draw(h.T, "how")
	cost := int64(0)
	if how == 2 && held > 0 {
		cost = rapid.Int64Range(1, held).Draw(h.T, "cost")
	}
	h.finish(j, how, cost)
	if j.state = "ending"; cost > 0 {
		h.m.end(j, cost)
	}
}

func (h *history) finish(j *modelJob, how int, cost int64) {
	row := h.g.job(j.id)
	h.g.in(h.level(), func(tx pgx.Tx) error {
		sql := "update river_job set state = 'completed', finalized_at = now() where id = $1"
		if how == 1 {
			sql = "delete from river_job where id = $1"
		}
		_, err := tx.Exec(h.g.ctx, sql, j.id)
		if err == nil && cost > 0 {
			c := holds.Capture{IDs: []string{jobs.Of(row).Hold}}
			for _, n := range j.needs {
				if !n.spent {
					c.Lines = []holds.Line{{Scope: n.scope, Amount: cost}}
					break
				}
			}
			_, err = h.g.book.Capture(h.g.ctx, tx, c)
		}
		return err
	})
}

// fail records a failed attempt of a job. One that gives its units back needs no charges for its next attempt.
func (h *history) fail() {
	j := h.pick("started")
	if j == nil {
		return
	}
	_, err := h.g.pool.Exec(h.g.ctx, "update river_job set state = 'retryable', attempt = attempt + 1, scheduled_at = now() + make_interval(secs => $2) where id = $1",
		j.id, rapid.IntRange(1000, 1100).Draw(h.T, "until"))
	require.NoError(h.T, err)
	if j.gives {
		j.state = "failing"
	}
}

// wait lets the time come of the next attempts of some jobs.
func (h *history) wait() {
	if j := h.pick("resting"); j != nil && j.next.After(h.m.now) {
		h.m.now = j.next
		h.clock.Set(h.m.now)
	}
}

func (h *history) change() {
	j := h.pick(rapid.SampledFrom([]string{"parked", "parked", "resting"}).Draw(h.T, "which"))
	if j == nil {
		return
	}
	if rapid.Bool().Draw(h.T, "cancel") {
		h.g.in(h.level(), func(tx pgx.Tx) error { _, err := h.g.CancelParked(h.g.ctx, tx, j.id); return err })
		j.state = "cancelled"
		return
	}
	priority := rapid.IntRange(1, 3).Draw(h.T, "to")
	h.g.in(h.level(), func(tx pgx.Tx) error { _, err := h.g.Reprioritize(h.g.ctx, tx, j.id, priority); return err })
	if priority != j.priority {
		j.priority = priority
		if j.state == "parked" {
			h.m.line(j)
		}
	}
}

func (h *history) advance() {
	h.m.now = h.m.now.Add(time.Duration(rapid.IntRange(1, 40).Draw(h.T, "seconds")) * time.Second)
	h.clock.Set(h.m.now)
}

// release gives back what ended jobs held, and looks at all that is due. Each job that starts must fit, and none that fits may be left. In each scope they are the first that fit.
func (h *history) release() {
	want := map[int64]bool{}
	var failing []*modelJob
	for _, j := range h.m.jobs {
		switch j.state {
		case "ending":
			h.m.end(j, 0)
		case "failing":
			h.m.end(j, 0)
			j.needs = slices.DeleteFunc(slices.Clone(j.first), func(n need) bool { return n.spent })
			j.first = j.needs
			failing = append(failing, j)
		}
	}
	h.m.rested()
	if len(h.scopes) == 1 {
		uses := slices.Clone(h.m.uses)
		for _, j := range h.m.parked() {
			if h.m.fits(j.needs) {
				want[j.id] = true
				h.m.start(j)
				j.state = "parked"
			}
		}
		h.m.uses = uses
	}
	report, err := h.g.Release(h.g.ctx, h.g.pool)
	require.NoError(h.T, err)
	require.Zero(h.T, report.Busy+report.Troubled+report.Dropped)
	for _, j := range failing { // River says when
		p, err := h.g.Explain(h.g.ctx, h.g.pool, j.id)
		require.NoError(h.T, err)
		require.Equal(h.T, "", p.Scope)
		require.Equal(h.T, "pending", pgtest.Value[string](h.g.t, h.g.pool, "select state::text from river_job where id = $1", j.id))
		j.state, j.next = "resting", p.NotBefore
	}
	started := 0
	var bursting []modelJob
	for _, j := range h.m.parked() {
		var waiting, there int
		require.NoError(h.T, h.g.pool.QueryRow(h.g.ctx, `select (select count(distinct job_id) from metered.parked_jobs where job_id = $1),
			(select count(*) from river_job where id = $1 and state <> 'pending')`, j.id).Scan(&waiting, &there))
		require.Equal(h.T, 1, waiting+there, "job %d is in one place", j.id)
		if there == 0 {
			continue
		}
		started++
		if len(h.scopes) == 1 {
			require.Contains(h.T, want, j.id)
		}
		if j.second != nil && h.held(j.id) != asLines(j.needs) {
			require.Equal(h.T, asLines(j.second), h.held(j.id))
			bursting = append(bursting, *j)
			j.needs = j.second
		}
		h.m.start(j)
	}
	for _, j := range bursting { // what has started since can only have taken more
		require.False(h.T, h.m.fits(j.needs), "job %d fits by its first choice: %+v", j.id, j)
	}
	require.EqualValues(h.T, started, report.Released)
	if len(h.scopes) == 1 {
		require.Len(h.T, want, started)
	}
	for _, j := range h.m.parked() {
		require.False(h.T, h.m.startable(j), "job %d fits and is parked: %+v", j.id, j)
	}
	h.check()
}

// check compares each scope's use, and that no limit was passed by what was let in.
func (h *history) check() {
	for _, scope := range h.scopes {
		usage, err := h.g.ledger.Usage(h.g.ctx, h.g.pool, budget.Query{Scope: scope, Window: h.m.window[scope]})
		require.NoError(h.T, err)
		got := usage[0].Used + usage[0].Held
		if h.m.window[scope] == 0 {
			got = usage[0].Spent - usage[0].Refunded - usage[0].Credited + usage[0].Held
		}
		require.Equal(h.T, h.m.used(scope), got, scope)
		require.LessOrEqual(h.T, got, h.m.most[scope], scope)
	}
}

// drain ends every job. Each that was not cancelled has run then.
func (h *history) drain() {
	for range 1000 {
		h.release()
		j := (*modelJob)(nil)
		for _, one := range h.m.jobs {
			if one.state == "started" {
				j = one
				h.finish(j, 0, 0)
				j.state = "ending"
			}
		}
		resting := slices.ContainsFunc(h.m.jobs, func(j *modelJob) bool { return j.state == "resting" })
		if len(h.m.parked()) == 0 && j == nil && !resting {
			break
		}
		if j == nil { // nobody runs: charges of lifetime limits keep them, or those of a window
			h.m.now = h.m.now.Add(time.Minute)
			h.clock.Set(h.m.now)
			for _, scope := range h.scopes {
				if short := h.m.used(scope); h.m.window[scope] == 0 && short > 0 {
					h.g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
						_, err := h.g.ledger.Credit(h.g.ctx, tx, budget.Credit{Scope: scope, Amount: short})
						return err
					})
					h.m.uses = append(h.m.uses, use{scope, -short, h.m.now, 0})
				}
			}
		}
	}
	require.Empty(h.T, h.m.parked(), "jobs that never ran")
	require.Zero(h.T, h.g.lines())
	require.Zero(h.T, pgtest.Value[int](h.g.t, h.g.pool, "select count(*) from metered.holds where pending and no > $1", h.before))
}

// Random histories of jobs, requests, credits and time, at the three levels, beside the model.
func TestGated_AnswersAsAListOfJobsAndLimits(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(1))
	var n atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		h := &history{T: rt, g: g, clock: clock, m: &model{most: map[string]int64{}, window: map[string]time.Duration{}, now: clock.Now(), turns: map[int]int64{}}}
		// A history that failed leaves jobs behind, and is run again.
		_, err := g.pool.Exec(g.ctx, "truncate metered.parked_jobs, metered.parked_scopes")
		require.NoError(rt, err)
		h.before = pgtest.Value[int64](t, g.pool, "select coalesce(max(no), 0) from metered.holds")
		for i := range rapid.IntRange(1, 3).Draw(rt, "scopes") {
			scope := fmt.Sprintf("scope/%d/%d", n.Add(1), i)
			h.scopes = append(h.scopes, scope)
			h.m.most[scope] = rapid.Int64Range(1, 5).Draw(rt, "most")
			h.m.window[scope] = time.Duration(rapid.SampledFrom([]int{0, 0, 30, 50}).Draw(rt, "window")) * time.Second
		}
		steps := []func(){h.enqueue, h.enqueue, h.enqueue, h.charge, h.credit, h.end, h.end, h.fail, h.wait, h.change, h.advance, h.release, h.release}
		for range rapid.IntRange(5, pgtest.Size(30, 60)).Draw(rt, "steps") {
			steps[rapid.IntRange(0, len(steps)-1).Draw(rt, "step")]()
		}
		h.drain()
	})
	pgtest.RequireVerified(t, g.pool, g.ledger)
}
