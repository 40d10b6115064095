package main

import (
	"net/http"
	"slices"

	"github.com/pgmetered/metered/budget"
)

// role is a user's role in their organisation.
type role string

const (
	customer  role = "customer"
	scanner   role = "scanner" // a device at the entrance
	boxOffice role = "box_office"
	manager   role = "manager"
)

// right is the right that an action needs.
type right int

const (
	buys    right = iota + 1 // holds seats, gives them back and pays for them
	sells                    // blocks seats, and sees the holders
	manages                  // decides on events, and reads the reports
)

var rights = map[role][]right{
	customer:  {buys},
	scanner:   {buys},
	boxOffice: {buys, sells},
	manager:   {buys, sells, manages},
}

func (r role) may(do right) bool { return slices.Contains(rights[r], do) }

// usual is the source that the page of such a user names.
func (r role) usual() string {
	switch r {
	case scanner:
		return "scanner"
	case boxOffice, manager:
		return "box_office"
	}
	return web
}

// source is a way by which seats are held. A request names it.
type source struct {
	roles    []role         // may use it
	statuses []status       // of the event, while it sells
	always   bool           // before the sale opens and after it has closed, too
	limits   []budget.Limit // on the holds of a user
}

// web is the source of a request that names none.
const web = "web"

var sources = map[string]source{
	web:          {roles: []role{customer, scanner, boxOffice, manager}, statuses: []status{statusPublished, statusLive}, limits: []budget.Limit{perUser}},
	"scanner":    {roles: []role{scanner, boxOffice, manager}, statuses: []status{statusLive}, always: true, limits: []budget.Limit{perUser}},
	"box_office": {roles: []role{boxOffice, manager}, statuses: []status{statusPublished, statusLive}, always: true},
}

// via is the source that a request names, if its user may use it.
func (r *request) via(name string) (string, error) {
	if name == "" {
		name = web
	}
	s, ok := sources[name]
	switch {
	case !ok:
		return "", badRequest("the source is none")
	case !slices.Contains(s.roles, r.who.Role):
		return "", &refusal{Status: http.StatusForbidden, Code: "source_not_allowed", Detail: "You may not hold seats this way."}
	}
	return name, nil
}
