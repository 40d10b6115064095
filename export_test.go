package metered

// LostError and RenewalError let tests see the cause of an ErrLost and an ErrNotRenewed.
type (
	LostError    = lostError
	RenewalError = renewalError
)
