package metered

import "github.com/pgmetered/metered/internal/uuidv7"

// NewID returns a UUID of version 7 for Command.ID: random, and carrying its time,
// so that it cannot look new again after retention. Make it where the command
// begins, at the client, and send it again with each repetition.
func NewID() string { return uuidv7.New() }
