package holds

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgmetered/metered/budget"
)

// State is the state of a hold.
type State string

// The states. A hold is held once, and ends once.
const (
	Held     State = "held"
	Captured State = "captured"
	Released State = "released"
	Expired  State = "expired"
	Returned State = "returned" // captured, and given back since
)

// states maps letters of the tables to states. Returned is a "c" in the tables, with a mark.
var states = map[string]State{"h": Held, "c": Captured, "r": Released, "x": Expired, "b": Returned}

// Hold is how a hold stood at Now. Once it is due it is Expired, swept or not.
type Hold struct {
	Tenant   string          `json:"tenant,omitempty"`
	ID       string          `json:"id"`
	Holder   string          `json:"holder,omitempty"`
	State    State           `json:"state"`
	Version  int             `json:"version"` // the number of transitions so far, 1 when placed
	PlacedAt time.Time       `json:"placed_at"`
	Deadline time.Time       `json:"deadline"`           // when it expires, unless it is extended
	Due      time.Time       `json:"due"`                // Deadline plus Request.Grace: the end of the time for capture
	Ceiling  time.Time       `json:"ceiling,omitzero"`   // the latest Deadline that Extend can reach, zero for none
	EndedAt  time.Time       `json:"ended_at,omitzero"`  // when it was captured or released, or Due if it expired, else zero
	Now      time.Time       `json:"now"`                // the database's clock when the hold was read
	Lines    []HeldLine      `json:"lines"`              // the units that it keeps, by scope
	Claim    *Key            `json:"claim,omitempty"`    // the key of a claim
	Entity   string          `json:"entity,omitempty"`   // Capture.Entity
	Reason   string          `json:"reason,omitempty"`   // Note.Reason of the call that Released or Returned it
	Metadata json.RawMessage `json:"metadata,omitempty"` // of the Request
	Created  bool            `json:"created,omitempty"`  // by this very call. False in a repetition and in other calls
	Charges  []budget.Posted `json:"charges,omitempty"`  // the entries of Request.Charges, if Created
	// Crossed lists the thresholds that this very call crossed by placing or capturing the hold, as passed to
	// budget.Config.OnThreshold. A repetition and a replay have none.
	Crossed []budget.Crossing `json:"crossed,omitempty"`
}

// HeldLine is a hold's part of one scope.
type HeldLine struct {
	Scope    string `json:"scope"`
	Amount   int64  `json:"amount"`             // placed
	Captured int64  `json:"captured"`           // charged so far, by expiry too
	Open     int64  `json:"open"`               // still held, 0 once the hold has ended
	Refunded int64  `json:"refunded,omitempty"` // the part of Captured that Return gave back
	AtLeast  int64  `json:"at_least,omitempty"` // captured when the hold expires (Line.AtLeast)
}

// Remaining is the time from Now to the deadline, 0 if the hold is not held or past it.
func (h Hold) Remaining() time.Duration {
	if h.State != Held {
		return 0
	}
	return max(0, h.Deadline.Sub(h.Now))
}

// decode reads JSON of the function hold_json in schema.sql, or that of a command's placement, which has charges.
func (h *Hold) decode(b []byte) error {
	var row struct {
		Tenant, ID, Holder, State string
		Version                   int
		PlacedAt                  time.Time  `json:"placed_at"`
		EndedAt                   *time.Time `json:"ended_at"`
		Ceiling                   *time.Time
		Deadline, Due, Now        time.Time
		Claim, Entity, Reason     *string
		Returned, Created         bool
		Metadata                  json.RawMessage
		Lines                     []HeldLine
		Charges                   []budget.Posted
	}
	if err := json.Unmarshal(b, &row); err != nil {
		return fmt.Errorf("holds: read a hold: %w", err)
	}
	*h = Hold{
		Tenant: row.Tenant, ID: row.ID, Holder: row.Holder, State: states[row.State], Version: row.Version,
		PlacedAt: row.PlacedAt.UTC(), Deadline: row.Deadline.UTC(), Due: row.Due.UTC(), Now: row.Now.UTC(),
		Lines: row.Lines, Created: row.Created,
	}
	if row.Returned {
		h.State = Returned
	}
	for _, c := range row.Charges {
		c.At = c.At.UTC()
		h.Charges = append(h.Charges, c)
	}
	if row.Ceiling != nil {
		h.Ceiling = row.Ceiling.UTC()
	}
	if row.EndedAt != nil {
		h.EndedAt = row.EndedAt.UTC()
	}
	if row.Entity != nil {
		h.Entity = *row.Entity
	}
	if row.Reason != nil {
		h.Reason = *row.Reason
	}
	if string(row.Metadata) != "null" {
		h.Metadata = row.Metadata
	}
	if row.Claim != nil {
		// A role that calls the SQL functions itself can claim any scope: one such hold must not keep others from
		// being read.
		if key, err := parseClaim(*row.Claim); err == nil {
			h.Claim = &key
		}
	}
	return nil
}
