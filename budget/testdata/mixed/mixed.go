// Command mixed does not compile: it mixes kinds up.
package main

import "github.com/pgmetered/metered/budget"

type (
	Seat struct{ Number string }
	Room struct{ Number string }
)

var (
	Seats = budget.Scopes[Seat]{Kind: "seat"}
	Rooms = budget.Scopes[Room]{Kind: "room"}
)

func main() {
	Seats.Charge(Seat{}, 1)
	Rooms.Charge(Room{}, 1)

	Seats.Charge(Room{}, 1)
	Seats.Credit(Room{}, 1)
	Seats.Scope(Room{})
	room, _ := Rooms.Parse("room/1")
	Seats.Scope(room)
}
