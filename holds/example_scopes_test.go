package holds_test

import (
	"fmt"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// userNames are declared once. A claim of one is a claim of the kind.
var userNames = budget.Scopes[string]{Kind: "user name"}

// rooms hold as many guests as their limit says.
var rooms = budget.Scopes[int]{Kind: "room", Limits: []budget.Limit{budget.Lifetime(4)}}

// Declared kinds keep the scopes of holds and claims apart, as they do those of charges.
func ExampleClaimOf() {
	line := holds.LineOf(rooms, 12, 2)
	fmt.Println(line.Scope, line.Amount, "of", line.Limits[0].Max)
	claim := holds.ClaimOf(userNames, "ann")
	scope, err := claim.Key.Scope("acme")
	check(err)
	fmt.Println(scope)
	name, err := holds.ParseKey(userNames, claim.Key)
	check(err)
	fmt.Println(name)
	// Output:
	// room/12 2 of 4
	// claim/user name%2Fann%2Facme
	// ann
}
