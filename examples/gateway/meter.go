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

// completion is the answer to a request, and the operation's recorded result.
type completion struct {
	Generation string `json:"generation"` // the model's id
	Text       string `json:"text"`
	Finish     string `json:"finish_reason"`
	Usage      usage  `json:"usage"`
	Cost       int64  `json:"cost_microdollars"`
}

// complete is a request, from its estimate to its bill. Its id makes it one request however often it is sent. While
// one is under way the same id is a 409 with Retry-After, and once it is settled it gets the recorded answer. If the
// gateway of the first has died, the request is carried out anew, once, when the first hold has fallen due and is
// free.
func (g *gateway) complete(w http.ResponseWriter, r *http.Request) error {
	c, id, request, err := g.read(w, r)
	if err != nil {
		return err
	}
	ctx := context.WithoutCancel(r.Context()) // a client that hangs up pays for the streamed part
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

// open holds a request's largest use of every level, or returns the refusal of a limit.
func (g *gateway) open(ctx context.Context, c *caller, id string, request chat) (*metered.Session[completion], error) {
	return metered.Open[completion](ctx, g.metered, metered.Reservation{
		ID: id, Tenant: c.key(), Name: "chat", Input: request, TTL: g.cfg.ttl, OpenTimeout: openTimeout,
		Lines: c.lines(prices[request.Model], request.atMost()), Charges: c.requests(), Note: budget.Note{Actor: c.key()},
	})
}

const writeSQL = `
insert into completions (key, id, generation, model, prompt, completion, cost, finish) values ($1, $2, $3, $4, $5, $6, $7, $8)`

// settle charges the used units, frees the rest, and stores the completion, in one transaction. Settle retries while
// the database is away: the session keeps its hold until it falls due.
func (g *gateway) settle(
	ctx context.Context, s *metered.Session[completion], c *caller, id string, request chat, got completion,
) (completion, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	got.Cost = prices[request.Model].of(got.Usage)
	used := metered.Cost{Lines: c.lines(prices[request.Model], got.Usage), Over: holds.OverAllowed} // it was incurred
	out, err := s.Settle(ctx, used, func(ctx context.Context, tx *metered.Tx) (completion, error) {
		_, err := tx.Exec(ctx, writeSQL, c.key(), id, got.Generation, request.Model, got.Usage.Prompt, got.Usage.Completion, got.Cost, got.Finish)
		return got, err
	})
	return out.Result, err
}

// How long the database may be away: before the model is called, which the client hears of, and after, which costs
// money.
const openTimeout, settleTimeout = 10 * time.Second, time.Minute
