package fault

// Listener is the error of a function of the caller's that a call runs in its transaction: a
// subscriber, or OnThreshold. Its code is that of Err.
type Listener struct {
	Doing string // the call of the function, for people
	Err   error
}

func (e *Listener) Error() string { return e.Doing + ": " + e.Err.Error() }

// Unwrap returns the function's error.
func (e *Listener) Unwrap() error { return e.Err }
