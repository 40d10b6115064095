package holds

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// sessionPrefix begins the ids of the holds of sessions. A digest of the operation's id, "_" and a UUID of the
// session follow.
const sessionPrefix = "session_"

const openSQL = `
select status, placed_at, deadline, seqs, ats, refused, stored, crossed
from metered.open_session($1::metered.new_command, $2::metered.new_hold, $3::metered.new_charge[], $4::interval, $5::int, $6::metered.origin, $7::text)`

// prepareOpen validates the request of a session's hold, of its operation's tenant. Each call makes another id.
func (b *Book) prepareOpen(r Request, o *ledger.Opening) (*call, error) {
	sum := sha256.Sum256([]byte(o.Operation))
	r.ID, r.opening = fmt.Sprintf("%s%x_%s", sessionPrefix, sum[:16], uuidv7.New()), o
	c, err := b.preparePlace(r)
	if err != nil {
		return nil, err
	}
	place := c.Args
	c.SQL = b.sql.open
	c.Args = func(s ledger.Sending) []any { return slices.Concat([]any{o.Command()}, place(s)[:6]) }
	return c, nil
}
