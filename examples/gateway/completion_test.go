package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// rows are the completions that were settled, by id.
func (f *fixture) rows() map[string]completion {
	f.t.Helper()
	rows, err := f.pool.Query(f.t.Context(), `select id, generation, finish, prompt, completion, cost from completions`)
	require.NoError(f.t, err)
	all := map[string]completion{}
	var id string
	var c completion
	_, err = pgx.ForEachRow(rows, []any{&id, &c.Generation, &c.Finish, &c.Usage.Prompt, &c.Usage.Completion, &c.Cost}, func() error {
		all[id] = c
		return nil
	})
	require.NoError(f.t, err)
	return all
}

// requireSettled waits until nothing is held, and checks that every level was charged the settled units, and nothing
// else.
func (f *fixture) requireSettled() map[string]completion {
	f.t.Helper()
	pgtest.WaitFor(f.t, "nothing to be held", func() bool {
		_, held := f.spent(credit("acme"))
		return held == 0
	})
	money, tokens := map[string]int64{}, map[string]int64{}
	rows, err := f.pool.Query(f.t.Context(), `
		select a.id, coalesce(sum(c.cost), 0)::bigint, coalesce(sum(c.prompt + c.completion), 0)::bigint
		from accounts a left join completions c on c.key = a.id or starts_with(c.key, a.id || '/') group by a.id`)
	require.NoError(f.t, err)
	var id string
	var cost, n int64
	_, err = pgx.ForEachRow(rows, []any{&id, &cost, &n}, func() error { money[id], tokens[id] = cost, n; return nil })
	require.NoError(f.t, err)
	for _, secret := range []string{"key-of-ann", "key-of-ben", "key-of-eve"} {
		r, _ := http.NewRequestWithContext(f.t.Context(), http.MethodGet, "/", nil)
		r.Header.Set("Authorization", "Bearer "+secret)
		c, err := f.caller(r)
		require.NoError(f.t, err)
		for _, m := range c.measures() {
			spent, held := f.spent(m.scope)
			require.Zero(f.t, held, m.scope)
			switch m.unit {
			case "money":
				require.Equal(f.t, money[m.account], spent, m.scope)
			case "tokens":
				require.Equal(f.t, tokens[m.account], spent, m.scope)
			}
		}
	}
	pgtest.RequireVerified(f.t, f.pool, f.metered.Budget)
	return f.rows()
}

func TestCompletion_IsBilledByTheModelsCount(t *testing.T) {
	t.Parallel()
	f := openGateway(t)
	f.grants(5 * dollar)
	for prompt, finish := range map[string]string{
		"How is a stream metered?":                "stop",
		"And one that is BREAK half of the way?":  "broken",
		strings.Repeat("a long prompt, too ", 99): "stop",
	} {
		h := f.ask(f.bases[0], "key-of-ann", fmt.Sprint(len(prompt)), prompt, 0)
		require.Equal(t, "", h.Problem)
		counted, ended := f.model.counted(h.Generation)
		require.Equal(t, finish, ended)
		require.Equal(t, counted, h.Usage)
		require.NotZero(t, counted.Completion)
		require.EqualValues(t, counted.Completion, len(strings.Fields(h.Text)))
		require.Equal(t, 10*counted.Prompt+30*counted.Completion, h.Cost)
		require.Equal(t, completion{Generation: h.Generation, Finish: finish, Usage: counted, Cost: h.Cost}, f.requireSettled()[fmt.Sprint(len(prompt))])
	}
}

func TestCompletion_AClientThatHangsUpPaysForTheGeneratedTokens(t *testing.T) {
	t.Parallel()
	f := openGateway(t)
	f.grants(5 * dollar)
	f.model.pace = 20 * time.Millisecond
	h := f.ask(f.bases[0], "key-of-ann", "cut", "How is a stream metered?", 3)
	require.Equal(t, "", h.Finish)
	var row completion
	pgtest.WaitFor(t, "the generation that was cut to be settled", func() (ok bool) { row, ok = f.rows()["cut"]; return ok })
	counted, finish := f.model.counted(h.Generation)
	require.Equal(t, "cancelled", finish, "the model went on")
	require.Equal(t, counted, row.Usage)
	require.GreaterOrEqual(t, counted.Completion, int64(3))
	f.requireSettled()

	again := f.ask(f.bases[0], "key-of-ann", "cut", "How is a stream metered?", 0)
	require.Equal(t, h.Generation, again.Generation, "the client gets its paid answer again")
	require.Equal(t, "cancelled", again.Finish)
	require.EqualValues(t, counted.Completion, len(strings.Fields(again.Text)))
	require.Len(t, f.model.ids(), 1)
	f.requireSettled()
}

func TestCompletion_SentManyTimesIsOne(t *testing.T) {
	t.Parallel()
	f := openGateway(t)
	f.grants(5 * dollar)
	all := make([]heard, 10)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			for all[i].Status == 0 || all[i].Status == http.StatusConflict { // the first is being carried out
				all[i] = f.ask(f.bases[0], "key-of-ann", "key", "How is a stream metered?", 0)
				time.Sleep(5 * time.Millisecond) // a client's pause
			}
		})
	}
	wg.Wait()
	for _, h := range all {
		require.Equal(t, all[0], h)
		require.Equal(t, "stop", h.Finish)
	}
	require.Len(t, f.model.ids(), 1)
	require.Equal(t, http.StatusUnprocessableEntity, f.ask(f.bases[0], "key-of-ann", "key", "Something else?", 0).Status)
	other := f.ask(f.bases[0], "key-of-ben", "key", "How is a stream metered?", 0)
	require.Equal(t, "stop", other.Finish, "another key's id is another id: %s", other.Problem)
	require.Len(t, f.model.ids(), 2)
	f.requireSettled()
}

func TestCompletion_EachLevelRefusesAndIsNamed(t *testing.T) {
	t.Parallel()
	f := openGateway(t)
	refused := func(limit string, status int) {
		t.Helper()
		h := f.ask(f.bases[0], "key-of-ann", "", "How is a stream metered?", 0)
		require.Equal(t, status, h.Status, h.Problem)
		require.Contains(t, h.Problem, `"violated-policies":["`+limit+`"]`)
		require.Empty(t, f.model.ids(), "the model was not asked")
		f.requireSettled()
	}
	refused("credit", http.StatusPaymentRequired)
	f.grants(5 * dollar)
	const estimate = 10*24 + 30*100 // bytes of the prompt, and max_tokens
	for _, limit := range []struct {
		account, level, column string
		enough                 int64
	}{
		{"acme", "organisation", "monthly", estimate},
		{"acme/search", "team", "monthly", estimate},
		{"acme/search/ann", "user", "monthly", estimate},
		{"acme/search/ann/laptop", "key", "monthly", estimate},
		{"acme/search", "team", "tokens_per_minute", 124},
		{"acme/search/ann/laptop", "key", "tokens_per_minute", 124},
		{"acme/search/ann/laptop", "key", "requests_per_minute", 1},
	} {
		unit, _, _ := strings.Cut(limit.column, "_")
		f.set(limit.account, limit.column, limit.enough-1)
		refused(limit.level+"-"+unit, http.StatusTooManyRequests)
		f.set(limit.account, limit.column, limit.enough)
	}
	require.Equal(t, "stop", f.ask(f.bases[0], "key-of-ann", "", "How is a stream metered?", 0).Finish, "the estimate fits exactly")
	f.requireSettled()
}

func TestCompletion_WithoutAnAnswerOfTheModelCostsNothing(t *testing.T) {
	t.Parallel()
	f := openGateway(t)
	f.grants(5 * dollar)
	model := f.cfg.model
	f.cfg.model = "http://127.0.0.1:1"
	require.Equal(t, http.StatusBadGateway, f.ask(f.bases[0], "key-of-ann", "key", "How is a stream metered?", 0).Status)
	require.Empty(t, f.requireSettled())
	f.cfg.model = model
	require.Equal(t, "stop", f.ask(f.bases[0], "key-of-ann", "key", "How is a stream metered?", 0).Finish, "the id was not used up")
	require.Len(t, f.requireSettled(), 1)
}
