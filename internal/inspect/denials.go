package inspect

import (
	"context"
	"time"
)

// Denial is one kind of refusal.
type Denial struct {
	Code  string    `json:"code"`            // as metered.Code has it
	Limit string    `json:"limit,omitempty"` // of a denial by a limit: its name, or how it reads
	Name  string    `json:"name,omitempty"`  // of the commands
	Count int64     `json:"count"`
	Last  time.Time `json:"last"`
}

// DenialList is what the database knows of refusals.
type DenialList struct {
	Now     time.Time     `json:"now"`
	Within  time.Duration `json:"within_ns"`
	Denials []Denial      `json:"denials"` // most frequent first
	Looked  int           `json:"looked"`  // so many records were looked at
	Whole   bool          `json:"whole"`   // all records of that time were looked at
}

// Denials counts the refusals on record, within the time before now.
//
// The database knows only of commands with metered.Command.RecordRefusal. A refusal of any other leaves nothing behind:
// it is rolled back. Who wants to know of all of them counts in the application (metered.Config.OnDenial, or the
// observer). A metered.Notice tells of what committed, and never of a refusal.
func (r *Reader) Denials(ctx context.Context, within time.Duration, limit int) (DenialList, error) {
	return DenialList{}, nil
}
