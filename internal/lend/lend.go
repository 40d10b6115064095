// Package lend is where the public packages of this module lend functions to each other that their
// users cannot call. The lender gives them at its start, under its name. A borrower, which imports
// the lender, says by an interface which of them it calls, and with which types.
package lend

import (
	"fmt"
	"reflect"
)

// lent are the functions of packages, as methods of one value of each. Only the starts of packages
// write it, one after the other.
var lent = map[string]any{}

// Lend gives the methods of a value to the packages that import a package.
func Lend(name string, functions any) {
	if lent[name] != nil {
		panic("lend: package " + name + " lends twice")
	}
	lent[name] = functions
}

// Borrow returns the functions of a package, as far as T, an interface, names them. It is for
// variables of a package that imports the lender. A function that is missing, or that has another
// type, is a panic when the program starts, so no test of the borrower passes.
func Borrow[T any](name string) T {
	functions, ok := lent[name].(T)
	if !ok {
		panic(fmt.Sprintf("lend: package %s does not lend %v, but %T", name, reflect.TypeFor[T](), lent[name]))
	}
	return functions
}
