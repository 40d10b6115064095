package budget

import (
	"encoding/json"
	"time"
)

// Note names the cause of an entry. Each text has up to 255 bytes.
type Note struct {
	Actor       string `json:"actor,omitempty"`
	Tenant      string `json:"tenant,omitempty"`
	Correlation string `json:"correlation,omitempty"`
	Reason      string `json:"reason,omitempty"`
	// of a charge, draw or hold, such as "images": lots of a wallet for this use (wallet.Grant.Uses) pay, too. The content of an id has it
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
		{".Actor", n.Actor}, {".Tenant", n.Tenant}, {".Correlation", n.Correlation}, {".Reason", n.Reason}, {".Use", n.Use},
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
