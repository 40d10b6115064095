package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/internal/pgtest"
)

// browser is a signed-in user, at any of the processes.
type browser struct {
	h       *hall
	user    string
	cookie  string
	process int
}

// login signs a user in over HTTP.
func (h *hall) login(user string) *browser {
	h.t.Helper()
	client := http.Client{Transport: pgtest.HTTP.Transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.PostForm(h.bases[0]+"/login", map[string][]string{"user": {user}})
	require.NoError(h.t, err)
	require.NoError(h.t, response.Body.Close())
	require.Len(h.t, response.Cookies(), 1)
	return &browser{h: h, user: user, cookie: sessionCookie + "=" + response.Cookies()[0].Value}
}

// people makes n users of an organisation and signs them in, at the processes in turn.
func (h *hall) people(org string, n int) []*browser {
	h.t.Helper()
	list := make([]*browser, n)
	for i := range list {
		user := metered.NewID()
		h.exec(`insert into hall.users values ($1, $2, $3)`, user, org, fmt.Sprint("user ", i))
		list[i] = h.login(user)
		list[i].process = i % len(h.bases)
	}
	return list
}

// staff makes a user of the organisation with a role and signs them in.
func (h *hall) staff(as role) *browser {
	h.t.Helper()
	id := metered.NewID()
	h.exec(`insert into hall.users values ($1, $2, $3, $4)`, id, h.org, string(as), as)
	return h.login(id)
}

// at is the same user in a tab at another process.
func (b *browser) at(process int) *browser {
	other := *b
	other.process = process
	return &other
}

// answer is the server's answer.
type answer struct {
	examplehttp.Answer
	body map[string]any
}

func (a answer) code() string { return a.Field("code") }

func (a answer) hold() string { return a.Field("hold_id") }

func (b *browser) do(method, path, key string, body any) answer {
	c := examplehttp.Client{Base: b.h.bases[b.process], HTTP: pgtest.HTTP}
	a := answer{Answer: c.Do(context.Background(), method, path, body, "User-Agent", "agent 007", "Cookie", b.cookie, "Idempotency-Key", key)}
	_ = json.Unmarshal([]byte(a.Body), &a.body)
	return a
}

func (b *browser) ask(method, path, key string, body any) answer {
	b.h.t.Helper()
	a := b.do(method, path, key, body)
	require.NoError(b.h.t, a.Err)
	return a
}

func (b *browser) seatPath(seat, what string) string {
	return "/api/events/" + b.h.event + "/seats/" + seat + "/" + what
}

// hold asks again with its key while the answer is that the outcome is not known: the machine may be busy.
func (b *browser) hold(seat string) (a answer) {
	b.h.t.Helper()
	key := metered.NewID()
	pgtest.WaitFor(b.h.t, "an answer", func() bool {
		a = b.ask(http.MethodPost, b.seatPath(seat, "hold"), key, nil)
		return a.Status != http.StatusServiceUnavailable
	})
	return a
}

// holdBy is hold by way of a source.
func (b *browser) holdBy(seat, source string) answer {
	b.h.t.Helper()
	return b.ask(http.MethodPost, b.seatPath(seat, "hold"), "", map[string]any{"source": source})
}

// set has the manager change the event, or a part of it.
func (h *hall) set(what string, body any) answer {
	h.t.Helper()
	return h.admin.ask(http.MethodPut, "/api/events/"+h.event+what, "", body)
}

// setSale has the manager set the sale, which is not refused.
func (h *hall) setSale(body map[string]any) {
	h.t.Helper()
	body["status"] = cmp.Or(body["status"], any("published"))
	a := h.set("", body)
	require.Equal(h.t, http.StatusOK, a.Status, a.Body)
}

func (b *browser) holding(seat string) string {
	b.h.t.Helper()
	a := b.hold(seat)
	require.Equal(b.h.t, http.StatusCreated, a.Status, a.Body)
	return a.hold()
}

func (b *browser) checkout(key string, ids ...string) answer {
	b.h.t.Helper()
	return b.ask(http.MethodPost, "/api/events/"+b.h.event+"/checkout", key, map[string]any{"holds": ids})
}

func (b *browser) cancel(hold string) answer {
	b.h.t.Helper()
	return b.ask(http.MethodDelete, "/api/holds/"+hold, "", nil)
}
