package httpmetered_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

func TestIdempotent_AnAnswerOf400AndMoreUndoesTheCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, nil)
	for _, status := range []int{400, 404, 409, 422, 500, 503, 599} {
		calls := 0
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			calls++
			require.NoError(t, order(r))
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, "call %d", calls)
		}
		for n := 1; n <= 2; n++ {
			r := s.post("body", fmt.Sprint(status))
			require.Equal(t, status, r.status)
			require.Equal(t, fmt.Sprintf("call %d", n), r.body, "it is the handler's own, and not on record")
			require.Equal(t, "7", r.header.Get("Retry-After"))
		}
	}
	require.Zero(t, s.orders())
	require.Zero(t, s.records())
	require.Empty(t, s.told(), "the handler knows its answer")
}

func TestIdempotent_CommitBelow500RecordsRefusalsOfTheHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{CommitBelow: 500}, nil)
	status := 0
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.NoError(t, order(r))
		w.WriteHeader(status)
		_, _ = io.WriteString(w, metered.NewID())
	}
	status = 404
	first := s.post("body", "k")
	status = 201
	require.Equal(t, first, s.post("body", "k"))
	require.Equal(t, 404, first.status)
	require.Equal(t, 1, s.orders())
	status = 500
	require.Equal(t, 500, s.post("body", "other").status)
	status = 201
	require.Equal(t, 201, s.post("body", "other").status)
	require.Equal(t, 2, s.orders())
}

func TestIdempotent_APanicUndoesTheCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		_ = order(r)
		w.WriteHeader(http.StatusCreated)
		panic(http.ErrAbortHandler)
	})
	_, err := s.send(t.Context(), "POST", "/orders/book", "ann", "body", "k")
	require.ErrorIs(t, err, io.EOF)
	require.Zero(t, s.orders())
	s.answer = created
	require.Equal(t, 201, s.post("body", "k").status)
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_AnAnswerThatCannotBeRecordedIsNotCommitted(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{AnswerBytes: 100, RequestBytes: 8}, nil)
	for name, answer := range map[string]http.HandlerFunc{
		"nothing": func(http.ResponseWriter, *http.Request) {},
		"a body that is too large": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 60))
			_, err := w.Write(make([]byte, 41))
			require.ErrorIs(t, err, fault.New("answer_unrecordable", ""))
		},
		"fields that are too large": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 17<<10))
			w.WriteHeader(200)
		},
		"a cookie": func(w http.ResponseWriter, _ *http.Request) {
			http.SetCookie(w, &http.Cookie{Name: "session", Value: "secret"})
			w.WriteHeader(200)
		},
		"a trailer": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(200)
			w.Header().Set(http.TrailerPrefix+"Sum", "1")
		},
		"a field that is no text": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", "\xff"); w.WriteHeader(200) },
		"a transaction that failed": func(w http.ResponseWriter, r *http.Request) {
			_, err := httpmetered.Tx(r).Exec(r.Context(), "nonsense")
			require.Error(t, err)
			w.WriteHeader(200)
		},
	} {
		s.answer = func(w http.ResponseWriter, r *http.Request) { require.NoError(t, order(r)); answer(w, r) }
		before := len(s.told())
		r := s.post("body", `"`+name+`"`)
		require.Equal(t, 500, r.status, name)
		require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, r.body, "no byte of its answer gets out")
		require.Empty(t, r.header.Values("Set-Cookie"))
		require.Len(t, s.told(), before+1, name)
	}
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.ErrorIs(t, http.NewResponseController(w).Flush(), http.ErrNotSupported)
		_, flusher := w.(http.Flusher)
		require.False(t, flusher)
		w.WriteHeader(http.StatusEarlyHints) // not sent
		_, _ = w.Write(make([]byte, 100))
	}
	require.Equal(t, 200, s.post("body", "whole").status)
	r := s.post("too large", "k")
	require.Equal(t, 413, r.status)
	require.JSONEq(t, `{"title":"Request Entity Too Large","status":413}`, r.body)
	require.Zero(t, s.orders())
}

// The handler gives its errors to Write, and Do sees them: errors that may pass are retried.
func TestIdempotent_WriteLetsTheCommandBeRepeated(t *testing.T) {
	t.Parallel()
	calls := 0
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		calls++
		body, _ := io.ReadAll(r.Body)
		require.Equal(t, "body", string(body), "each attempt has it")
		if calls < 3 {
			_, err := httpmetered.Tx(r).Exec(r.Context(), `do $$ begin raise exception 'collided' using errcode = '40001'; end $$`)
			w.Header().Set("X-Attempt", "first")
			httpmetered.Write(struct{ wrapped }{wrapped{w}}, fmt.Errorf("order: %w", err))
			return
		}
		created(w, r)
	})
	r := s.post("body", "k")
	require.Equal(t, 201, r.status)
	require.Empty(t, r.header.Get("X-Attempt"))
	require.Equal(t, 3, calls)
	require.Equal(t, 1, s.orders())

	s.answer = func(w http.ResponseWriter, r *http.Request) { httpmetered.Write(w, errNobody) }
	require.Equal(t, 401, s.post("body", "l").status)
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		calls++
		httpmetered.Write(w, budget.ErrBusy)
	}
	calls = 0
	require.Equal(t, 503, s.post("body", "m").status)
	require.Equal(t, 1, calls, "only collisions are repeated here")
}

type wrapped struct{ http.ResponseWriter }

func (w wrapped) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func charging(record bool, limits ...budget.Limit) func(*http.Request, []byte) (metered.Command, error) {
	return func(r *http.Request, body []byte) (metered.Command, error) {
		if string(body) == "bad" {
			return metered.Command{}, &httpmetered.Problem{Status: 400, Detail: "bad"}
		}
		return metered.Command{RecordRefusal: record, Charges: []budget.Charge{{Scope: "ann", Amount: int64(len(body)), Limits: limits}}}, nil
	}
}

func TestIdempotent_ARefusedCommandAnswersTheRefusal(t *testing.T) {
	t.Parallel()
	limit := budget.PerWindow(10, time.Hour).Named("hourly")
	policies := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{limit}})
	for _, record := range []bool{false, true} {
		s := newShop(t, httpmetered.IdempotentConfig{Command: charging(record, limit), Policies: policies}, created)
		clock := pgtest.SetClock(t, s.pool, time.Date(2031, 5, 6, 12, 0, 0, 0, time.UTC))
		first := s.post("sixsix", "a")
		require.Equal(t, 201, first.status)
		require.Equal(t, `"hourly";r=4;t=3600`, first.header.Get("RateLimit"))
		refused := s.post("sixsix", "b")
		require.Equal(t, 429, refused.status)
		require.Equal(t, "3600", refused.header.Get("Retry-After"))
		require.Equal(t, "budget_exceeded", refused.code())
		require.Contains(t, refused.body, `"violated-policies":["hourly"]`)
		require.Equal(t, `"hourly";r=4;t=3600`, refused.header.Get("RateLimit"))
		require.Empty(t, refused.header.Get("Location"), "the handler's answer is dropped")
		require.Equal(t, 1, s.orders())

		bad := s.post("bad", "c")
		require.Equal(t, 400, bad.status)
		require.JSONEq(t, `{"title":"Bad Request","status":400,"detail":"bad"}`, bad.body)

		clock.Advance(2 * time.Hour)
		again := s.post("sixsix", "b")
		if record {
			require.Equal(t, refused, again)
			require.Equal(t, 422, s.post("sixsiX", "b").status)
		} else {
			require.Equal(t, 201, again.status)
			require.Equal(t, 2, s.orders())
		}
	}
}

// A limit that the program made up wrongly is its own mistake: the log names the argument, and the client hears nothing of it.
func TestIdempotent_AMistakeOfTheProgramIs500(t *testing.T) {
	t.Parallel()
	for field, limit := range map[string]budget.Limit{
		"Limits[0].Tell":        budget.PerWindow(10, time.Hour).Named("hourly").WithThresholds(budget.Threshold{Name: "most", Percent: 80}),
		"Limits[0].Window":      {Max: 10},
		"Limits[0].Period.Zone": budget.Per(10, budget.Day, time.Local, time.Time{}),
	} {
		s := newShop(t, httpmetered.IdempotentConfig{Command: charging(false, limit)}, created)
		r := s.post("six", "a")
		require.Equal(t, 500, r.status, field)
		require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, r.body)
		require.Len(t, s.told(), 1)
		require.ErrorContains(t, s.told()[0], field)
		require.Zero(t, s.records())
	}
}

// Clients make up methods. The commands of requests without a pattern have few names all the same.
func TestIdempotent_AMethodThatIsMadeUpIsNoName(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	client, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	once, err := httpmetered.Idempotent(client, httpmetered.IdempotentConfig{Tenant: func(*http.Request) (string, error) { return "ann", nil }})
	require.NoError(t, err)
	handler := once(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }))
	for i, method := range []string{"POST", "PATCH", "MADEUP", "post", "M1", "M2"} {
		r := httptest.NewRequest("POST", "/", strings.NewReader("body"))
		r.Method = method
		r.Header.Set("Idempotency-Key", fmt.Sprint(i))
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		require.Equal(t, http.StatusCreated, w.Code)
	}
	require.Equal(t, "PATCH,POST,other", pgtest.Value[string](t, pool, `select string_agg(distinct name collate "C", ',' order by name collate "C") from metered.operations`))
}

func TestIdempotent_WithoutAKeyWhereItIsOptionalAndSafeMethods(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{Optional: true}, created)
	a, b := s.post("body"), s.post("body")
	require.Equal(t, []int{201, 201}, []int{a.status, b.status})
	require.NotEqual(t, a.body, b.body)
	require.Equal(t, 400, s.post("body", `"`).status)
	require.Equal(t, 2, s.orders())
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.Nil(t, httpmetered.Tx(r))
		_, flusher := w.(http.Flusher)
		require.True(t, flusher)
	}
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE"} {
		r, err := s.send(t.Context(), method, "/orders/book", "nobody", "", `"`)
		require.NoError(t, err)
		require.Equal(t, 200, r.status)
	}
	require.Equal(t, 2, s.records())
}

func TestIdempotent_AKeyWithATimeIsNotCarriedOutAgainAfterAPurge(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	key := metered.NewID()
	require.Equal(t, 201, s.post("body", `"`+key+`"`).status)
	pgtest.SetClock(t, s.pool, time.Now().Add(2*time.Hour))
	purged, err := purge.Operations.Delete(t.Context(), s.pool, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, purged)
	r := s.post("body", `"`+key+`"`)
	require.Equal(t, 409, r.status)
	require.Equal(t, "operation_retired", r.code())
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_WithoutTheSchemaIs500WithoutDetail(t *testing.T) {
	t.Parallel()
	s := branch(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}), httpmetered.IdempotentConfig{}, metered.Config{}, created)
	r := s.post("body", "k")
	require.Equal(t, 500, r.status)
	require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, r.body)
	require.ErrorIs(t, errors.Join(s.told()...), budget.ErrNotMigrated)
}

func TestIdempotent_RefusesUnusableArguments(t *testing.T) {
	t.Parallel()
	client, err := metered.New(pgtest.Open(t), metered.Config{})
	require.NoError(t, err)
	tenant := func(*http.Request) (string, error) { return "ann", nil }
	_, err = httpmetered.Idempotent(nil, httpmetered.IdempotentConfig{Tenant: tenant})
	require.ErrorIs(t, err, budget.ErrArgument)
	for _, cfg := range []httpmetered.IdempotentConfig{
		{}, {Tenant: tenant, CommitBelow: 299}, {Tenant: tenant, CommitBelow: 501}, {Tenant: tenant, RequestBytes: -1},
		{Tenant: tenant, AnswerBytes: -1}, {Tenant: tenant, AnswerBytes: (256 << 10) + 1},
	} {
		_, err := httpmetered.Idempotent(client, cfg)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	_, err = httpmetered.Idempotent(client, httpmetered.IdempotentConfig{Tenant: tenant, AnswerBytes: (256 << 10)})
	require.NoError(t, err)
}
