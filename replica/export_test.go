package replica

// StaleError lets tests see the fields of an ErrStale.
type StaleError = staleError
