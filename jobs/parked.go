package jobs

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Parked is a job that waits for units. Explain alone sets Position, Waiting, LookedAt and Refused.
// A job in trouble stands in no line between its tries.
type Parked struct {
	// JobID is the id that the job will have in River.
	JobID int64 `json:"job_id"`

	// Queue is the queue that the job will be in.
	Queue string `json:"queue"`

	// Kind is the kind of the job.
	Kind string `json:"kind"`

	// Key is that of the job's Options, or "".
	Key string `json:"key,omitempty"`

	// Tenant is that of the job's Options.
	Tenant string `json:"tenant,omitempty"`

	// Fair is the FairKey of the job's Options: lines of one scope take turns by it.
	Fair string `json:"fair,omitempty"`

	// Priority is the job's priority in River, from 1, which goes first, to 4.
	Priority int `json:"priority"`

	// Args are the job's arguments.
	Args json.RawMessage `json:"args"`

	// Scope is the scope whose units the job waits for.
	Scope string `json:"scope"`

	// Amount are the units that the job needs of Scope.
	Amount int64 `json:"amount"`

	// ParkedAt is when the job was parked.
	ParkedAt time.Time `json:"parked_at"`

	// DropAt is when the job is dropped if it still waits then. It is zero for never.
	DropAt time.Time `json:"drop_at,omitzero"`

	// NotBefore is when the next attempt of a job with Options.GiveBack may start that was tried
	// before. Until then it is in no line, and Scope is "".
	NotBefore time.Time `json:"not_before,omitzero"`

	// Position is the job's place in the line, from 1, which is next, to 10,000.
	Position int64 `json:"position,omitempty"`

	// Waiting is how many jobs are in the line.
	Waiting int64 `json:"waiting,omitempty"`

	// LookedAt is when the line is looked at next, or when a job in trouble is tried again. It is
	// zero if that is when units are freed.
	LookedAt time.Time `json:"looked_at,omitzero"`

	// Trouble says why the job's last try failed, such as that River has another job of its id. In
	// Explain it also says why the last look at the line failed. It is "" if nothing did.
	Trouble string `json:"trouble,omitempty"`

	// Refused are the limits that keep the job, with their use, and until when.
	Refused []string `json:"refused,omitempty"`
}

// noTime is so long that nobody waits for it: a job's hold without a TTL would end in ten years.
const noTime = 5 * 365 * 24 * time.Hour

func (p *Parked) decode(raw []byte) error {
	var row struct {
		Parked
		DropAt    *time.Time `json:"drop_at"`
		NotBefore *time.Time `json:"not_before"`
		WakeAt    *time.Time `json:"wake_at"`
		Now       time.Time
		Refused   []refusal `json:"refused"`
		Charges   []asked
		Burst     struct {
			Refused []refusal
			Charges []asked
		}
	}
	if err := json.Unmarshal(raw, &row); err != nil {
		return err
	}
	*p = row.Parked
	p.ParkedAt = p.ParkedAt.UTC()
	p.Refused = append(reasons(row.Refused, row.Charges), reasons(row.Burst.Refused, row.Burst.Charges)...)
	if row.DropAt != nil {
		p.DropAt = row.DropAt.UTC()
	}
	if row.NotBefore != nil {
		p.NotBefore = row.NotBefore.UTC()
	}
	if row.WakeAt != nil && row.WakeAt.Before(row.Now.Add(noTime)) {
		p.LookedAt = row.WakeAt.UTC()
	}
	return nil
}

// refusal is that of a limit, by its number among the limits of all charges.
type refusal struct {
	Limit   *int
	Scope   string
	Used    int64
	Held    int64
	Own     int64
	Leased  int64
	RetryUS int64 `json:"retry_us"`
}

// asked is a charge and its limits.
type asked struct {
	Scope  string
	Amount int64
	Limits []struct {
		Max      int64
		WindowUS *float64 `json:"window_us"`
	}
}

func reasons(refused []refusal, charges []asked) (all []string) {
	for _, r := range refused {
		if r.Limit == nil {
			all = append(all, fmt.Sprintf("%q does not exist, or is closed", r.Scope))
			continue
		}
		n := *r.Limit
		for _, c := range charges {
			if n < len(c.Limits) {
				all = append(all, reason(c.Scope, c.Amount, c.Limits[n].Max, c.Limits[n].WindowUS,
					r.Used, r.Held+r.Own+r.Leased, r.RetryUS))
				break
			}
			n -= len(c.Limits)
		}
	}
	return all
}

const (
	changeSQL  = `select metered.change_parked($1::bigint, $2::int, $3::int)`
	explainSQL = `select metered.explain_parked($1::bigint, $2::interval)`
	listSQL    = `
select j.job_id, j.job operator(pg_catalog.->>) 'queue', j.job operator(pg_catalog.->>) 'kind',
	coalesce(j.job operator(pg_catalog.->) 'metadata' operator(pg_catalog.->>) 'metered:key', ''), j.tenant, j.fair, j.priority,
	j.job operator(pg_catalog.->) 'args', j.scope, j.amount, j.parked_at, j.drop_at, j.not_before, coalesce(j.trouble, '')
from metered.parked_jobs j
where j.scope = $1 and (j.priority, j.turn, j.job_id) > (
	select coalesce(pg_catalog.max(a.priority), -1), coalesce(pg_catalog.max(a.turn), -1), coalesce(pg_catalog.max(a.job_id), -1)
	from metered.parked_jobs a where a.job_id = $2 and a.scope = $1)
order by j.priority, j.turn, j.job_id limit $3`
)

// CancelParked takes a parked job out of its line for good, and returns it, or ErrNotParked. Its
// key stays used.
func (e *Enqueuer) CancelParked(ctx context.Context, tx pgx.Tx, jobID int64) (Parked, error) {
	return e.change(ctx, tx, jobID, nil)
}

// Reprioritize gives a parked job another of River's priorities, 1 (first) to 4, and the last turn
// in it. A job in trouble is tried again at once, by its own priority, too.
func (e *Enqueuer) Reprioritize(ctx context.Context, tx pgx.Tx, jobID int64, priority int) (Parked, error) {
	if priority < 1 || priority > 4 {
		return Parked{}, invalid("priority", "%d: want 1 to 4", priority)
	}
	return e.change(ctx, tx, jobID, &priority)
}

func (e *Enqueuer) change(ctx context.Context, tx pgx.Tx, jobID int64, priority *int) (p Parked, err error) {
	if err := e.gated("tx", tx); err != nil {
		return p, err
	}
	const doing = "change a parked job"
	var raw []byte
	err = answer.QueryRow(ctx, tx, e.gate.changeSQL, jobID, priority, int32(e.wait/time.Millisecond)).Scan(&raw)
	if err != nil {
		return p, fault.Failed("jobs", doing, err)
	}
	if err := p.read(raw); err != nil || priority != nil || p.NotBefore.IsZero() {
		return p, err
	}
	// It was tried before, so it is River's, too.
	_, err = tx.Exec(ctx, e.gate.cancelSQL, []int64{p.JobID}, []string{holdOf(raw)})
	return p, fault.Failed("jobs", doing, err)
}

// Explain returns a parked job with its place in line and the limits that keep it, or ErrNotParked.
func (e *Enqueuer) Explain(ctx context.Context, db querier, jobID int64) (p Parked, err error) {
	if err := e.gated("db", db); err != nil {
		return p, err
	}
	probe, err := inBudget.Charges(inHolds.Ledger(e.gate.book), budget.Charge{Scope: "x", Amount: 1})
	if err != nil {
		return p, err
	}
	return p, e.one(&p, "explain a parked job",
		answer.QueryRow(ctx, db, e.gate.explainSQL, jobID, probe.Tolerance))
}

// one reads a row with a parked job, or null.
func (e *Enqueuer) one(p *Parked, doing string, row pgx.Row) error {
	var raw []byte
	if err := row.Scan(&raw); err != nil {
		return fault.Failed("jobs", doing, err)
	}
	return p.read(raw)
}

// read is decode, or ErrNotParked for null.
func (p *Parked) read(raw []byte) error {
	if raw == nil {
		return ErrNotParked
	}
	return p.decode(raw)
}

// holdOf is the id of the hold of a parked job.
func holdOf(raw []byte) string {
	var row struct{ Hold string }
	_ = json.Unmarshal(raw, &row) // it was decoded before
	return row.Hold
}

// Parked returns up to 1,000 jobs that wait for a scope, in the order of its line, behind the job
// of id after. For 0, or a job that has left, it begins with the first.
func (e *Enqueuer) Parked(ctx context.Context, db rowsQuerier, scope string, after int64,
	most int) ([]Parked, error) {
	if err := e.gated("db", db); err != nil {
		return nil, err
	}
	if most < 1 || most > 1000 {
		return nil, invalid("most", "%d: want 1 to 1000", most)
	}
	rows, err := answer.Query(ctx, db, e.gate.listSQL, scope, after, most)
	if err != nil {
		return nil, fault.Failed("jobs", "list parked jobs", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p Parked, err error) {
		var dropAt, notBefore *time.Time
		err = row.Scan(&p.JobID, &p.Queue, &p.Kind, &p.Key, &p.Tenant, &p.Fair, &p.Priority,
			&p.Args, &p.Scope, &p.Amount, &p.ParkedAt, &dropAt, &notBefore, &p.Trouble)
		p.ParkedAt = p.ParkedAt.UTC()
		if notBefore != nil {
			p.NotBefore = notBefore.UTC()
		}
		if dropAt != nil {
			p.DropAt = dropAt.UTC()
		}
		return p, err
	})
	return all, fault.Failed("jobs", "list parked jobs", err)
}

// rowsQuerier runs reads of many rows.
type rowsQuerier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// reason says in words which limit keeps a job.
func reason(scope string, amount, most int64, windowUS *float64, used, held, retryUS int64) string {
	within := "in its period"
	switch {
	case windowUS != nil && *windowUS == 0:
		within = "in all"
	case windowUS != nil:
		within = "in " + (time.Duration(*windowUS) * time.Microsecond).String()
	}
	until := "when units are freed"
	if retryUS >= 0 && retryUS < noTime.Microseconds() {
		until = "in " + (time.Duration(retryUS) * time.Microsecond).String()
	}
	if windowUS != nil && *windowUS == 0 && (used < 0 || most == 0) { // a wallet, or other credit
		return fmt.Sprintf("%q has credit for %d: %d held of it, %d wanted: %s", scope,
			max(0, most-used), held, amount, until)
	}
	return fmt.Sprintf("%q has a limit of %d %s: %d used, %d held, %d wanted: %s", scope, most,
		within, used, held, amount, until)
}
