package holds

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgmetered/metered/budget"
)

// State is the state of a hold.
type State string

const (
	// Held is the state of an open hold.
	Held State = "held"

	// Captured is the state of a hold whose units were spent.
	Captured State = "captured"

	// Released is the state of a hold that was freed by a call.
	Released State = "released"

	// Expired is the state of a hold that fell due.
	Expired State = "expired"

	// Returned is the state of a captured hold that was given back since.
	Returned State = "returned"
)

// states maps letters of the tables to states. Returned is a "c" in the tables, with a mark.
var states = map[string]State{"h": Held, "c": Captured, "r": Released, "x": Expired, "b": Returned}

// Hold is a hold at Now, Expired once it is due.
type Hold struct {
	// Tenant is the hold's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the hold's id, unique within Tenant.
	ID string `json:"id"`

	// Holder is who holds the units.
	Holder string `json:"holder,omitempty"`

	// State is Held, Captured, Released, Expired or Returned.
	State State `json:"state"`

	// Version counts the hold's transitions. It is 1 when the hold is placed.
	Version int `json:"version"`

	// PlacedAt is when the hold was placed.
	PlacedAt time.Time `json:"placed_at"`

	// Deadline is until when the units are promised to the holder. Extend moves it.
	Deadline time.Time `json:"deadline"`

	// Due is the end of capture: Deadline plus Placement.Grace.
	Due time.Time `json:"due"`

	// Ceiling bounds Extend. It is zero for no bound.
	Ceiling time.Time `json:"ceiling,omitzero"`

	// EndedAt is when the hold was captured or released, or Due if it expired.
	EndedAt time.Time `json:"ended_at,omitzero"`

	// Now is the database's clock at the read. Use it to show the time left.
	Now time.Time `json:"now"`

	// Lines are the units of the hold, by scope.
	Lines []HeldLine `json:"lines"`

	// Claim is the key of a claim, and nil for another hold.
	Claim *Key `json:"claim,omitempty"`

	// Entity is that of the Capture, or "".
	Entity string `json:"entity,omitempty"`

	// Reason is that of the Note of the hold's Release or Return.
	Reason string `json:"reason,omitempty"`

	// Metadata is that of the Placement.
	Metadata json.RawMessage `json:"metadata,omitempty"`

	// Created says that this call placed the hold.
	Created bool `json:"created,omitempty"`

	// Charges are the entries of Placement.Charges, if Created.
	Charges []budget.Posted `json:"charges,omitempty"`

	// Crossed has the thresholds that this call crossed.
	Crossed []budget.Crossing `json:"crossed,omitempty"`
}

// HeldLine is a hold's units of a scope.
type HeldLine struct {
	// Scope is the scope whose units are held.
	Scope string `json:"scope"`

	// Amount are the units that were placed.
	Amount int64 `json:"amount"`

	// Captured are the units that were charged, by expiry too.
	Captured int64 `json:"captured"`

	// Open are the units that are still held.
	Open int64 `json:"open"`

	// Refunded are the units of Captured that a Return gave back.
	Refunded int64 `json:"refunded,omitempty"`

	// AtLeast is Line.AtLeast.
	AtLeast int64 `json:"at_least,omitempty"`
}

// Remaining is the time from Now to the deadline, or 0 if it is not held.
func (h Hold) Remaining() time.Duration {
	if h.State != Held {
		return 0
	}
	return max(0, h.Deadline.Sub(h.Now))
}

// decode reads JSON of the function hold_json in schema.sql, or that of a command's placement,
// which has charges.
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
		// A role that calls the SQL functions itself can claim any scope: one such hold must not
		// keep others from being read.
		if key, err := parseClaim(*row.Claim); err == nil {
			h.Claim = &key
		}
	}
	return nil
}
