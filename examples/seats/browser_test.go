package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// browser is a signed-in user, at any of the processes.
type browser struct {
	h       *hall
	user    string
	cookie  *http.Cookie
	process int
}

// login signs a user in over HTTP.
func (h *hall) login(user string) *browser {
	h.t.Helper()
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.PostForm(h.bases[0]+"/login", map[string][]string{"user": {user}})
	require.NoError(h.t, err)
	require.NoError(h.t, response.Body.Close())
	require.Len(h.t, response.Cookies(), 1)
	return &browser{h: h, user: user, cookie: response.Cookies()[0]}
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
	status int
	header http.Header
	text   string
	body   map[string]any
}

func (a answer) code() string { s, _ := a.body["code"].(string); return s }

func (a answer) hold() string { s, _ := a.body["hold_id"].(string); return s }

func (b *browser) do(method, path, key string, body any) (a answer, err error) {
	var reader io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return a, err
		}
		reader = bytes.NewReader(raw)
	}
	request, err := http.NewRequest(method, b.h.bases[b.process]+path, reader)
	if err != nil {
		return a, err
	}
	request.Header.Set("User-Agent", "agent 007")
	if b.cookie != nil {
		request.AddCookie(b.cookie)
	}
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return a, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	a = answer{status: response.StatusCode, header: response.Header, text: string(raw)}
	_ = json.Unmarshal(raw, &a.body)
	return a, err
}

func (b *browser) ask(method, path, key string, body any) answer {
	b.h.t.Helper()
	a, err := b.do(method, path, key, body)
	require.NoError(b.h.t, err)
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
		return a.status != http.StatusServiceUnavailable
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
	require.Equal(h.t, http.StatusOK, a.status, a.text)
}

func (b *browser) holding(seat string) string {
	b.h.t.Helper()
	a := b.hold(seat)
	require.Equal(b.h.t, http.StatusCreated, a.status, a.text)
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
