// Package lend is the key to functions that the public packages of this module lend to each other,
// and not to their users: budget.Internals, holds.Internals and so on take one.
package lend

// Key is the parameter of such a function. Only a package of this module can import it.
type Key struct {
	_ struct{} // no other package can write a literal of the same type
}
