package main

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/wallet"
)

// config is a process's settings.
type config struct {
	model string        // the address of the model's server
	ttl   time.Duration // how long a request that nobody renews keeps its hold

	seeded bool // the database has the organisation of seedSQL
}

// gateway is one process of the application.
type gateway struct {
	cfg     config
	pool    *pgxpool.Pool
	metered *metered.Client
	wallet  *wallet.Book
	http    *http.Client
}

func newGateway(pool *pgxpool.Pool, cfg config) (*gateway, error) {
	g := &gateway{cfg: cfg, pool: pool, http: &http.Client{Transport: &http.Transport{ResponseHeaderTimeout: time.Minute}}}
	var err error
	if g.metered, err = metered.New(pool, metered.Config{}); err != nil {
		return nil, err
	}
	g.wallet, err = wallet.New(g.metered.Budget, wallet.Config{Priorities: map[string]int{"promotional": 0, "paid": 1}})
	return g, err
}

// handler serves
//
//	POST /v1/chat/completions {"model": "small", "messages": [{"role": "user", "content": "…"}], "max_tokens": 100}
//	GET  /v1/usage       the usage and limits of each level
//	POST /v1/credit      {"id": "payment-1", "amount": 5000000, "expires": "2030-01-01T00:00:00Z"}
//
// with Authorization: Bearer and a key's secret, or the admin's for the last. A completion is streamed.
// With an Idempotency-Key it can be sent again.
func (g *gateway) handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, serve := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST /v1/chat/completions": g.complete,
		"GET /v1/usage":             g.usage,
		"POST /v1/credit":           g.credit,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Cache-Control", "no-store")
			if err := serve(w, r); err != nil {
				fail(w, r, err)
			}
		})
	}
	return mux
}

// send ends a stream with the settled completion. A replay has the whole text in one event.
func send(w http.ResponseWriter, got completion, whole bool) error {
	text := ""
	if whole {
		text = got.Text
	}
	if sendEvent(w, struct {
		chunk
		Cost int64 `json:"cost_microdollars"`
	}{newChunk(got.Generation, text, got.Finish, got.Usage), got.Cost}) == nil {
		_ = sendEvent(w, done)
	}
	return nil // the client has gone, or not: it is settled
}

var errRequest = &httpmetered.Problem{
	Status: http.StatusBadRequest, Detail: "want a model (small or large), messages, and max_tokens from 1 to 4096",
}

// read reads a request and its caller. Its id is the Idempotency-Key, or a new one.
func (g *gateway) read(w http.ResponseWriter, r *http.Request) (c *caller, id string, request chat, err error) {
	if c, err = g.caller(r); err != nil {
		return nil, "", chat{}, err
	}
	if id, err = httpmetered.OptionalKey(r); err != nil {
		return nil, "", chat{}, err
	}
	request = chat{MaxTokens: 256}
	err = json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&request)
	if _, known := prices[request.Model]; err != nil || !known || request.MaxTokens < 1 || request.MaxTokens > 4096 || request.atMost().Prompt == 0 {
		return nil, "", chat{}, errors.Join(errRequest, err)
	}
	request.Stream = true // even if the client wants no stream
	return c, id, request, nil
}

// fail answers an error, and names the limits that refused. A stream that has begun ends with an event.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	problem := httpmetered.ProblemOf(err)
	var exceeded *budget.ExceededError
	if errors.As(err, &exceeded) {
		for _, refusal := range exceeded.Refusals {
			problem.ViolatedPolicies = append(problem.ViolatedPolicies, refusal.Limit.Name)
		}
	}
	if problem.Status >= http.StatusInternalServerError {
		slog.ErrorContext(r.Context(), r.Pattern, "status", problem.Status, "error", err)
	}
	if w.Header().Get("Content-Type") == "text/event-stream" {
		_ = sendEvent(w, map[string]any{"error": problem})
		return
	}
	problem.Write(w)
}
