package inspect

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// OperationState is the outcome of an operation.
type OperationState string

const (
	Committed OperationState = "committed" // or it is a usage event that was counted (budget.Ledger.Ingest)
	Refused   OperationState = "refused"   // metered.Command.RecordRefusal
)

// Operation is the record of an operation, without its input, which nobody stores, and its result,
// which only metered.Client.Lookup reads.
type Operation struct {
	Tenant   string           `json:"tenant,omitempty"`
	ID       string           `json:"id"`
	Name     string           `json:"name,omitempty"` // metered.Command.Name, "" also if an older build recorded it
	State    OperationState   `json:"state"`
	At       time.Time        `json:"at"`                 // when it was completed
	IssuedAt time.Time        `json:"issued_at,omitzero"` // the time that the id carries
	Charges  []budget.Posted  `json:"charges,omitempty"`  // without Standings
	Code     string           `json:"code,omitempty"`     // of the refusal, as metered.Code has it
	Refusal  string           `json:"refusal,omitempty"`  // its text
	Refusals []budget.Refusal `json:"refusals,omitempty"` // each limit that refused, with its scope
	Holds    []HoldRef        `json:"holds,omitempty"`    // placed, captured, released or refunded
	JobIDs   []int64          `json:"job_ids,omitempty"`  // of River, made by Tx.Enqueue
}

// HoldRef names a hold, with its state when the operation was completed.
type HoldRef struct {
	Tenant string `json:"tenant,omitempty"`
	ID     string `json:"id"`
	State  string `json:"state"`
}

// OperationFilter selects operations. A zero field selects all. An operation must match every other
// field.
type OperationFilter struct {
	Tenant *string // nil: all of them
	Name   string
	State  OperationState
	Since  time.Time // completed at this time or later
	Before time.Time // completed before
	After  string    // continues a list: OperationList.Next of the page before
	Limit  int       // the size of a page, 1 to MaxPage. Defaults to DefaultPage
}

// OperationList is a page of operations, newest first.
type OperationList struct {
	Operations []Operation `json:"operations"`
	Next       string      `json:"next,omitempty"` // continues the list, "" at its end
}

// Operations lists operations, newest first. A page looks at MaxLooked of them: it may be empty and
// have a Next.
func (r *Reader) Operations(ctx context.Context, f OperationFilter) (OperationList, error) {
	limit, err := pageSize(f.Limit)
	if err := cmp.Or(err, checkText("OperationFilter.Name", f.Name)); err != nil {
		return OperationList{}, err
	}
	if f.State != "" && f.State != Committed && f.State != Refused {
		return OperationList{}, invalid("OperationFilter.State", "%q is not a state", f.State)
	}
	from := operationCursor{At: endOfTime}
	if !f.Before.IsZero() {
		from.At = f.Before
	}
	if f.After != "" {
		if err := from.parse(f.After); err != nil {
			return OperationList{}, err
		}
	}
	list, err := collect(ctx, r, operationsSQL, scanOperation,
		from.At, from.Tenant, from.ID, f.Since, MaxLooked, f.Tenant, f.Name, f.State, limit)
	if err != nil {
		return OperationList{}, failed("operations", err)
	}
	page := OperationList{Operations: list}
	if len(list) == limit {
		last := list[limit-1]
		page.Next = operationCursor{last.At, last.Tenant, last.ID}.String()
		return page, nil
	}
	var end operationCursor
	err = r.row(ctx, operationsEndSQL, from.At, from.Tenant, from.ID, f.Since, MaxLooked).Scan(&end.At, &end.Tenant, &end.ID)
	switch {
	case err == nil:
		page.Next = end.String()
	case !errors.Is(err, pgx.ErrNoRows):
		return OperationList{}, failed("operations", err)
	}
	return page, nil
}

var endOfTime = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

// operationCursor is the last operation that was looked at.
type operationCursor struct {
	At     time.Time
	Tenant string
	ID     string
}

func (c operationCursor) String() string {
	b, _ := json.Marshal(c) // of a time of this millennium and texts: never fails
	return base64.RawURLEncoding.EncodeToString(b)
}

func (c *operationCursor) parse(text string) error {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || json.Unmarshal(b, c) != nil || checkText("", c.Tenant) != nil || checkText("", c.ID) != nil {
		return invalid("OperationFilter.After", "is not an OperationList.Next")
	}
	return nil
}

// newestOperations are those after a cursor, newest first, by the index of their times.
const newestOperations = `
    from metered.operations_words o
    where o.at <= $1 and (o.at < $1 or (o.tenant, o.id) < ($2, $3)) and o.at >= $4
    order by o.at desc, o.tenant desc, o.id desc`

const operationColumns = `
    d.tenant, d.id, coalesce(d.name, ''), d.state, d.at, d.issued_at, d.scopes, d.amounts, d.seqs, d.ats,
    coalesce(d.refusal_code, ''), coalesce(d.refusal_text, ''),
    case when pg_catalog.json_typeof(d.refusal_limits) = 'array' then d.refusal_limits end, d.holds, d.jobs`

// Only operations that match pay for the columns that are dear to read.
const operationsSQL = `
select` + operationColumns + `
from (select o.tenant, o.id, o.name, o.state` + newestOperations + ` limit $5) x,
    lateral (select * from metered.operations_words y where y.tenant = x.tenant and y.id = x.id limit 1) d
where ($6::text is null or x.tenant = $6) and ($7 = '' or x.name = $7) and ($8::text = '' or x.state = $8)
limit $9`

const operationsEndSQL = `select o.at, o.tenant, o.id` + newestOperations + ` offset $5::bigint - 1 limit 1`

func scanOperation(row pgx.CollectableRow) (o Operation, err error) {
	var issued *time.Time
	var scopes []string
	var amounts, seqs []int64
	var ats []time.Time
	var refusals, refs []byte
	err = row.Scan(&o.Tenant, &o.ID, &o.Name, &o.State, &o.At, &issued, &scopes, &amounts, &seqs, &ats, &o.Code, &o.Refusal, &refusals, &refs, &o.JobIDs)
	if err != nil {
		return o, err
	}
	o.At, o.IssuedAt = o.At.UTC(), moment(issued)
	for i, scope := range scopes {
		o.Charges = append(o.Charges, budget.Posted{Scope: scope, Amount: amounts[i], Seq: seqs[i], At: ats[i].UTC()})
	}
	if refusals != nil {
		err = json.Unmarshal(refusals, &o.Refusals)
	}
	if refs != nil {
		err = cmp.Or(err, json.Unmarshal(refs, &o.Holds))
	}
	return o, err
}

// OperationDetail is an operation with its entries, holds and jobs.
type OperationDetail struct {
	Operation
	Now  time.Time `json:"now"`
	Jobs JobList   `json:"jobs"`
	// Met are the entries that the limits of Refusals counted: for each of the first ones the last
	// entry of its scope by then, 0 if the scope had none, or they were purged.
	Met []int64 `json:"met,omitempty"`
}

// refusalsMet is the number of refusals whose entries are looked up.
const refusalsMet = 10

// Operation returns the record of an operation with its jobs, or ErrUnknown.
func (r *Reader) Operation(ctx context.Context, tenant, id string) (OperationDetail, error) {
	if err := cmp.Or(checkText("tenant", tenant), checkText("id", id)); err != nil {
		return OperationDetail{}, err
	}
	var d OperationDetail
	var err error
	if d.Now, err = r.now(ctx); err != nil {
		return OperationDetail{}, err
	}
	found, err := collect(ctx, r, operationSQL, scanOperation, tenant, id)
	switch {
	case err != nil:
		return OperationDetail{}, failed("operation", err)
	case len(found) == 0:
		return OperationDetail{}, fmt.Errorf("%w: operation %q of tenant %q is not on record", ErrUnknown, id, tenant)
	}
	d.Operation = found[0]
	for _, refusal := range d.Refusals[:min(refusalsMet, len(d.Refusals))] {
		seq, err := r.lastBy(ctx, refusal.Scope, d.At)
		if err != nil {
			return OperationDetail{}, err
		}
		d.Met = append(d.Met, seq)
	}
	d.Jobs, err = r.Jobs(ctx, d.JobIDs)
	return d, err
}

// lastBy is the number of a scope's last entry by a time, 0 if it had none, or it was purged.
func (r *Reader) lastBy(ctx context.Context, scope string, at time.Time) (int64, error) {
	for e, err := range r.Ledger.Entries(ctx, r.DB, scope, budget.EntriesOptions{NewestFirst: true, To: at.Add(time.Microsecond), Max: 1}) {
		if errors.Is(err, budget.ErrWindowPurged) {
			return 0, nil
		}
		return e.Seq, err
	}
	return 0, nil
}

const operationSQL = `
select` + operationColumns + `
from metered.operations_words d where d.tenant = $1 and d.id = $2`
