package budget

import (
	"encoding/json"
	"time"
)

// Note names the cause of an entry. Each text has up to 255 bytes.
type Note struct {
	// Actor is who acts, such as "user:ann". Sweeps write "system", and workers of package jobs
	// "job:" with their kind.
	Actor string `json:"actor,omitempty"`

	// Tenant is the customer on whose behalf it is.
	Tenant string `json:"tenant,omitempty"`

	// Correlation is an id that other systems know, such as a request's or a trace's.
	Correlation string `json:"correlation,omitempty"`

	// Reason says why, for people.
	Reason string `json:"reason,omitempty"`

	// Use is what a charge, draw or hold is for, such as "images". Lots of a wallet that pay for
	// this use alone (wallet.Grant.Uses) pay, too. It is part of the content of an operation's id.
	Use string `json:"use,omitempty"`
}

const maxNoteBytes = 255

// checkNote refuses a note that cannot be stored, or that lacks an actor.
func (l *Ledger) checkNote(field string, n Note) error {
	if n == (Note{}) && !l.actor {
		return nil
	}
	if l.actor && n.Actor == "" {
		return invalid(field+".Actor", "is empty, and Config.RequireActor is set")
	}
	for _, f := range []struct{ name, text string }{
		{".Actor", n.Actor}, {".Tenant", n.Tenant}, {".Correlation", n.Correlation},
		{".Reason", n.Reason}, {".Use", n.Use},
	} {
		if err := checkText(field+f.name, f.text, maxNoteBytes); err != nil {
			return err
		}
	}
	return nil
}

// json is the note as it is stored, and "" for an empty one.
func (n Note) json() string {
	if n == (Note{}) {
		return ""
	}
	// Strings that are valid UTF-8 cannot fail to marshal.
	b, _ := json.Marshal(n)
	return string(b)
}

// occurred is the note of an event as it is stored.
func (n Note) occurred(at time.Time) string {
	b, _ := json.Marshal(struct {
		Note
		OccurredAt time.Time `json:"occurred_at"`
	}{n, at})
	return string(b)
}
