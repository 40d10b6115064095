package holds

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/listen"
)

// Notice is a committed transition.
type Notice struct {
	// Missed says that transitions may have been missed. All other fields are empty then.
	Missed bool `json:"missed,omitempty"`

	// Tenant is the hold's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the hold's id.
	ID string `json:"id,omitempty"`

	// Version is the hold's version after the transition.
	Version int `json:"version,omitempty"`

	// Kind is what happened to the hold.
	Kind EventKind `json:"kind,omitempty"`

	// At is the time of the transition. It and all fields below need the sender's
	// Config.NotifyContent.
	At time.Time `json:"at,omitzero"`

	// Claim is the key of a claim.
	Claim *Key `json:"claim,omitempty"`

	// State is the hold's state after the transition.
	State State `json:"state,omitempty"`

	// Holder is who holds the units.
	Holder string `json:"holder,omitempty"`

	// Deadline is the hold's deadline after the transition.
	Deadline time.Time `json:"deadline,omitzero"`

	// Note is the caller's note of the transition.
	Note budget.Note `json:"note,omitzero"`

	// Lines are the hold's lines after the transition.
	Lines []HeldLine `json:"lines,omitempty"`

	// Cut says that Note or Lines did not fit into the notice: History and Get have them.
	Cut bool `json:"cut,omitempty"`
}

// ListenOptions configures Listen. The zero value has the documented defaults.
type ListenOptions struct {
	// Idle bounds the silence of a connection, 10ms to 1h. Defaults to 15s.
	Idle time.Duration

	// OnError hears of a lost connection, in another goroutine. Defaults to none.
	OnError func(error)
}

// Listen calls handle with every transition that a Book with Config.Notify commits, one at a time,
// in the order of commit. It returns ctx's error or handle's.
//
// A notice is a hint, which any role can send: read the hold (Get) before you act. After each
// connect, and where notices were lost, handle gets one with Missed: read your holds again. A
// transition may come twice: compare the Version.
//
// Listen makes a connection of its own with pool's configuration, and again within 10s when it is
// lost. It must lead to the primary, and not through a pooler in transaction mode.
func (b *Book) Listen(ctx context.Context, pool *pgxpool.Pool, opts ListenOptions,
	handle func(context.Context, Notice) error) error {
	if err := cmp.Or(b.made(), notNil("pool", pool), notNil("handle", handle)); err != nil {
		return err
	}
	if len(b.Channel()) > listen.MaxNameBytes { // no Book can notify on it
		return invalid("ledger", "the channel %q is longer than the 63 bytes of a name: use a shorter schema", b.Channel())
	}
	idle, wrong := listen.Idle(opts.Idle)
	if wrong != "" {
		return invalid("ListenOptions.Idle", "%s", wrong)
	}
	return listen.Run(ctx, listen.Channel[Notice]{
		Name: b.Channel(), Config: pool.Config(), Parse: parseNotice, Missed: Notice{Missed: true},
		Idle: idle, OnError: listen.Wrapped("holds", opts.OnError),
	}, handle)
}

// announced are the kinds as schema.sql's function announce gets them.
var announced = map[string]EventKind{
	"placed": EventPlaced, "captured_part": EventCapturedPart, "returned_part": EventReturnedPart,
	"captured": EventCaptured, "extended": EventExtended,
	"released": EventReleased, "expired": EventExpired, "returned": EventReturned,
}

// parseNotice reads a payload. One that this build cannot read counts as missed: anybody can notify
// on a channel, and a later schema may add fields.
func parseNotice(payload string) (Notice, bool) {
	var p struct {
		Tenant, ID, Kind string
		Version          int

		At       time.Time
		Claim    *string
		State    *string
		Holder   string
		Deadline time.Time
		Note     budget.Note
		Lines    []HeldLine
		Cut      bool
	}
	err := json.Unmarshal([]byte(payload), &p)
	kind, known := announced[p.Kind]
	if err != nil || !known || p.ID == "" || p.Version < 1 {
		return Notice{}, false
	}
	n := Notice{Tenant: p.Tenant, ID: p.ID, Version: p.Version, Kind: kind}
	if p.State == nil {
		return n, true
	}
	if p.Claim != nil {
		key, err := parseClaim(*p.Claim)
		if err != nil {
			return Notice{}, false
		}
		n.Claim = &key
	}
	n.At, n.State, n.Holder, n.Deadline, n.Note, n.Lines, n.Cut = p.At.UTC(), states[*p.State],
		p.Holder, p.Deadline.UTC(), p.Note, p.Lines, p.Cut
	return n, n.State != ""
}
