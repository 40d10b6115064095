package inspect

import (
	"context"
	"time"

	"github.com/pgmetered/metered/budget"
)

// OperationState is what became of an operation.
type OperationState string

const (
	Committed OperationState = "committed"
	Refused   OperationState = "refused" // metered.Command.RecordRefusal
	Event     OperationState = "event"   // a usage event of budget.Ledger.Ingest
)

// Operation is the record of an operation, without its input, which nobody stores, and its result, which is not for
// this role: metered.Client.Lookup has it.
type Operation struct {
	Namespace string          `json:"namespace,omitempty"`
	ID        string          `json:"id"`
	Name      string          `json:"name,omitempty"` // metered.Command.Name; "" also if an older build recorded it
	State     OperationState  `json:"state"`
	At        time.Time       `json:"at"`                 // when it was completed
	IssuedAt  time.Time       `json:"issued_at,omitzero"` // the time that the id carries
	Charges   []budget.Posted `json:"charges,omitempty"`  // without Standings
	Code      string          `json:"code,omitempty"`     // of the refusal, as metered.Code has it
	Refusal   string          `json:"refusal,omitempty"`  // its text
	Holds     []HoldRef       `json:"holds,omitempty"`    // what it placed, captured, released or gave back
	JobIDs    []int64         `json:"job_ids,omitempty"`  // of River, made by Tx.Enqueue
}

// HoldRef names a hold, and what it was when the operation was completed.
type HoldRef struct {
	Tenant string `json:"tenant,omitempty"`
	ID     string `json:"id"`
	State  string `json:"state"`
}

// OperationFilter selects operations. A zero field selects all; the others must all match.
type OperationFilter struct {
	Namespace *string // nil: all of them
	Name      string
	State     OperationState
	Since     time.Time // completed at this time or later
	Before    time.Time // completed before
	After     string    // continues a list: OperationList.Next of the page before
	Limit     int       // the size of a page, 1 to MaxPage; defaults to DefaultPage
}

// OperationList is a page of operations, newest first.
type OperationList struct {
	Operations []Operation `json:"operations"`
	Next       string      `json:"next,omitempty"` // continues the list; "" at its end
}

// Operations lists operations, newest first. A page looks at MaxLooked of them: it may be empty and have a Next.
func (r *Reader) Operations(ctx context.Context, f OperationFilter) (OperationList, error) {
	return OperationList{}, nil
}

// OperationDetail is an operation and what came of it.
type OperationDetail struct {
	Operation
	Now  time.Time `json:"now"`
	Jobs JobList   `json:"jobs"`
}

// Operation returns the record of an operation with its jobs, or ErrUnknown.
func (r *Reader) Operation(ctx context.Context, namespace, id string) (OperationDetail, error) {
	return OperationDetail{}, nil
}
