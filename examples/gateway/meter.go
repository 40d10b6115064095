package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// completion is what came of a request. It is the operation's recorded result.
type completion struct {
	Generation string `json:"generation"` // the model's id
	Text       string `json:"text"`
	Finish     string `json:"finish_reason"`
	Usage      usage  `json:"usage"`
	Cost       int64  `json:"cost_microdollars"`
}

// complete is a request, from its estimate to its bill. Its id makes it one request however often it is sent: while it goes
// on somewhere, the same id is a 409 with Retry-After; once it is settled, it gets the recorded answer; and if the gateway
// that carried it out has died, it is carried out anew, once, when what that one held has fallen due. That was freed.
func (g *gateway) complete(w http.ResponseWriter, r *http.Request) error {
	c, id, request, err := g.read(w, r)
	if err != nil {
		return err
	}
	ctx := context.WithoutCancel(r.Context()) // a client that hangs up pays for what it had
	s, err := g.open(ctx, c, id, request)
	if err != nil {
		return err // a limit refuses, or the id is in use
	}
	defer s.Close()
	if s.Finished() {
		return send(w, s.Outcome().Result, true)
	}
	got, err := g.relay(s.Context(), w, r, request)
	if err != nil {
		return errors.Join(err, s.Cancel(ctx, "the model did not answer"))
	}
	if got, err = g.settle(ctx, s, c, id, request, got); err != nil {
		return err
	}
	return send(w, got, false)
}

// open holds what a request may use of every level, or says which limit refuses.
func (g *gateway) open(ctx context.Context, c *caller, id string, request chat) (*metered.Session[completion], error) {
	return metered.Open[completion](ctx, g.metered, metered.Reservation{
		ID: id, Namespace: c.key(), Name: "chat", Input: request, TTL: g.cfg.ttl, OpenTimeout: openTimeout,
		Lines: c.lines(prices[request.Model], request.atMost()), Charges: c.requests(), Note: budget.Note{Actor: c.key()},
	})
}

const writeSQL = `
insert into completions (key, id, generation, model, prompt, completion, cost, finish) values ($1, $2, $3, $4, $5, $6, $7, $8)`

// settle charges what was used, frees the rest, and writes the completion down, in one transaction. While the database is
// away Settle tries again: the session keeps what it holds until it falls due.
func (g *gateway) settle(
	ctx context.Context, s *metered.Session[completion], c *caller, id string, request chat, got completion,
) (completion, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	got.Cost = prices[request.Model].of(got.Usage)
	used := metered.Used{Lines: c.lines(prices[request.Model], got.Usage), Over: holds.OverAllowed} // it was incurred
	out, err := s.Settle(ctx, used, func(ctx context.Context, tx *metered.Tx) (completion, error) {
		_, err := tx.Exec(ctx, writeSQL, c.key(), id, got.Generation, request.Model, got.Usage.Prompt, got.Usage.Completion, got.Cost, got.Finish)
		return got, err
	})
	return out.Result, err
}

// How long the database may be away: before the model is asked, which is told to the client, and after, which costs money.
const openTimeout, settleTimeout = 10 * time.Second, time.Minute
