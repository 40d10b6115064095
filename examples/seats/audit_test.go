package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// record is a row of the audit table.
type record struct {
	Actor, Action, Code, Operation string
	Event, Block, Seat, Hold       string
	Address, Agent                 string
	Changes                        map[string]any
}

// records are the rows from the one with an id on.
func (h *hall) records(from int64) []record {
	h.t.Helper()
	rows, err := h.pool.Query(h.t.Context(), `
		select actor, action, code, coalesce(operation, ''), coalesce(event::text, ''), coalesce(block::text, ''), coalesce(seat::text, ''),
		    coalesce(hold, ''), address, agent, case when jsonb_typeof(changes) = 'object' then changes end
		from hall.audit where id > $1 order by id`, from)
	require.NoError(h.t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[record])
	require.NoError(h.t, err)
	return list
}

const lastRecord = `select coalesce(max(id), 0) from hall.audit`

// obj is a JSON object.
type obj = map[string]any

func TestAudit_HasActorActionAddressAndChange(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	h.till(nil)
	event := "/api/events/" + h.event
	ben := h.people(h.org, 1)[0]
	does := func(b *browser, method, path string, body any, want record) answer {
		t.Helper()
		from := one[int64](h, lastRecord)
		a := b.ask(method, path, "op-"+want.Action, body)
		require.Less(t, a.Status, 300, a.body)
		if want.Action == "checkout" {
			want.Changes["entity"] = "order/" + a.body["order_id"].(string)
		}
		got := h.records(from)
		require.Len(t, got, 1)
		if want.Seat != "" && want.Hold == "" { // its id is new
			require.Regexp(t, holdForm, got[0].Hold)
			want.Hold = got[0].Hold
		}
		want.Actor, want.Event, want.Address, want.Agent, want.Operation = "user:"+b.user, h.event, "127.0.0.1", "agent 007", "op-"+want.Action
		require.Equal(t, want, got[0])
		return a
	}
	placed := obj{"transition": "placed", "state": "held", "source": "web", "held_until": noon.Add(5 * time.Minute).Format(time.RFC3339)}
	held := does(ben, http.MethodPost, event+"/seats/"+h.seats[0]+"/hold", obj{"source": "web"}, record{Action: "hold", Seat: h.seats[0], Changes: placed})
	does(ben, http.MethodPost, event+"/checkout", obj{"holds": []string{held.hold()}}, record{Action: "checkout", Seat: h.seats[0], Hold: held.hold(),
		Changes: obj{"transition": "captured", "state": "sold", "source": "web"}})
	given := ben.holding(h.seats[1])
	does(ben, http.MethodDelete, "/api/holds/"+given, nil, record{Action: "cancel", Seat: h.seats[1], Hold: given,
		Changes: obj{"transition": "released", "state": "free", "source": "web", "reason": "cancelled"}})
	does(h.admin, http.MethodPost, event+"/seats/"+h.seats[2]+"/block", nil, record{Action: "block", Seat: h.seats[2],
		Changes: obj{"transition": "captured", "state": "blocked", "reason": "blocked"}})
	does(h.admin, http.MethodPost, event+"/seats/"+h.seats[2]+"/unblock", nil, record{Action: "unblock", Seat: h.seats[2],
		Changes: obj{"transition": "returned", "state": "free", "reason": "unblocked"}})
	does(h.admin, http.MethodPut, event+"/blocks/"+h.blocks[0], obj{"capacity": 80}, record{Action: "capacity", Block: h.blocks[0],
		Changes: obj{"was": obj{"capacity": 100.0}, "is": obj{"capacity": 80.0}}})
	does(h.admin, http.MethodPut, event, obj{"status": "live"}, record{Action: "sale", Changes: obj{
		"was": obj{"status": "published", "opens": nil, "closes": nil}, "is": obj{"status": "live", "opens": nil, "closes": nil}}})

	// An expiry has no request and no address.
	ends := ben.holding(h.seats[3])
	from := one[int64](h, lastRecord)
	clock.Advance(time.Hour)
	_, err := h.app.metered.Holds.Sweep(t.Context(), h.pool, holds.SweepOptions{})
	require.NoError(t, err)
	got := h.records(from)
	require.Len(t, got, 1)
	require.NotContains(t, got[0].Actor, "user")
	require.Equal(t, record{Actor: got[0].Actor, Action: "expired", Event: h.event, Seat: h.seats[3], Hold: ends,
		Changes: obj{"transition": "expired", "state": "free", "source": "web"}}, got[0])
	h.verify()
}

func TestAudit_HasEachFailureWithItsActionAndRequest(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	h.till(nil)
	event := "/api/events/" + h.event
	people := h.people(h.org, 2)
	ben := people[0]
	held := people[1].holding(h.seats[0])
	before := h.written()
	for _, test := range []struct {
		by           *browser
		method, path string
		body         any
		want         record
	}{
		{ben, "POST", event + "/seats/" + h.seats[0] + "/hold", obj{"source": "web"},
			record{Action: "hold", Code: "seat_held", Event: h.event, Seat: h.seats[0], Changes: obj{"source": "web"}}},
		{ben, "POST", event + "/seats/" + h.seats[2] + "/hold", obj{"source": "scanner"},
			record{Action: "hold", Code: "source_not_allowed", Event: h.event, Seat: h.seats[2], Changes: obj{"source": "scanner"}}},
		{ben, "DELETE", "/api/holds/" + held, nil, record{Action: "cancel", Code: "not_found", Hold: held}},
		{ben, "POST", event + "/checkout", obj{"holds": []string{held}},
			record{Action: "checkout", Code: "not_found", Event: h.event, Changes: obj{"holds": []any{held}}}},
		{ben, "POST", event + "/seats/" + h.seats[0] + "/block", nil, record{Action: "block", Code: "not_allowed", Event: h.event, Seat: h.seats[0]}},
		{h.admin, "PUT", event + "/blocks/" + h.blocks[0], obj{"capacity": -1},
			record{Action: "capacity", Code: "bad_request", Event: h.event, Block: h.blocks[0], Changes: obj{"capacity": -1.0}}},
	} {
		from := one[int64](h, lastRecord)
		a := test.by.ask(test.method, test.path, "op", test.body)
		require.Equal(t, test.want.Code, a.code(), test.path)
		got := h.records(from)
		require.Len(t, got, 1)
		test.want.Actor, test.want.Address, test.want.Agent, test.want.Operation = "user:"+test.by.user, "127.0.0.1", "agent 007", "op"
		require.Equal(t, test.want, got[0])
	}
	require.Equal(t, before, h.written(), "nothing else")
	h.verify()
}
