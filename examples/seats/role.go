package main

import (
	"net/http"
	"slices"

	"github.com/pgmetered/metered/budget"
)

// role is a user's role in their organisation. Each may do what the one before may.
type role string

const (
	customer  role = "customer"   // holds seats, gives them back and pays for them
	boxOffice role = "box_office" // blocks seats
	manager   role = "manager"    // decides on events
)

var roles = []role{customer, boxOffice, manager}

func (r role) may(needed role) bool { return slices.Index(roles, r) >= slices.Index(roles, needed) }

// source is a way by which seats are held. A request names it.
type source struct {
	needs    role
	statuses []status       // of the event, while it sells
	always   bool           // before the sale opens and after it has closed, too
	limits   []budget.Limit // on the holds of a user
}

// web is the source of a request that names none.
const web = "web"

var sources = map[string]source{
	web:          {needs: customer, statuses: []status{statusPublished, statusLive}, limits: []budget.Limit{perUser}},
	"scanner":    {needs: boxOffice, statuses: []status{statusLive}, always: true, limits: []budget.Limit{perUser}},
	"box_office": {needs: boxOffice, statuses: []status{statusPublished, statusLive}, always: true},
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
	case !r.who.Role.may(s.needs):
		return "", &refusal{Status: http.StatusForbidden, Code: "source_not_allowed", Detail: "You may not hold seats this way."}
	}
	return name, nil
}
