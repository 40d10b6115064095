package httpmetered_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A client that hangs up pays for the streamed part, and the reservation ends. While it streams, the same key gets
// 409 and a time to come back, and afterwards the record.
func TestStream_AClientThatHangsUpPaysForTheStreamedPart(t *testing.T) {
	t.Parallel()
	pool, client := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	const asked = 3
	var sent atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s, err := metered.Open[int64](r.Context(), client, metered.Reservation{
			ID: "key", Tenant: "ann", Lines: []holds.Line{{Scope: "lines", Amount: 1_000_000}}})
		if err != nil {
			httpmetered.Write(w, err)
			return
		}
		defer s.Close()
		if s.Finished() {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		for range asked {
			if _, err := io.WriteString(w, "line\n"); err != nil {
				break
			}
			_ = http.NewResponseController(w).Flush()
			sent.Add(1)
		}
		<-s.Context().Done()
		n := sent.Load()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
		defer cancel()
		_, err = s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: "lines", Amount: n}}, Over: holds.OverAllowed},
			func(context.Context, *metered.Tx) (int64, error) { return n, nil })
		if err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	first, err := pgtest.HTTP.Get(server.URL)
	require.NoError(t, err)
	lines := bufio.NewScanner(first.Body)
	for range asked {
		require.True(t, lines.Scan())
	}
	second, err := pgtest.HTTP.Get(server.URL)
	require.NoError(t, err)
	_ = second.Body.Close()
	require.Equal(t, http.StatusConflict, second.StatusCode)
	require.NotEmpty(t, second.Header.Get("Retry-After"))
	require.NoError(t, first.Body.Close()) // it hangs up
	var u []budget.Usage
	pgtest.WaitFor(t, "nothing to be held", func() bool {
		u, err = client.Budget.Usage(t.Context(), pool, budget.Query{Scope: "lines"})
		return err == nil && u[0].Held == 0
	})
	require.EqualValues(t, []int64{asked, asked}, []int64{sent.Load(), u[0].Used})
	third, err := pgtest.HTTP.Get(server.URL)
	require.NoError(t, err)
	_ = third.Body.Close()
	require.Equal(t, http.StatusNoContent, third.StatusCode)
}

// If the settlement fails, the client sees that the streamed answer is cut, and nothing is appended to it.
func TestStream_AnAnswerThatCannotBeSettledIsCut(t *testing.T) {
	t.Parallel()
	pool, client := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	clock := pgtest.SetClock(t, pool, time.Now())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := chat(client, tooLate{w, clock}, r); err != nil {
			httpmetered.Write(w, err)
		}
	}))
	defer server.Close()
	request, err := http.NewRequest(http.MethodPost, server.URL, strings.NewReader("hello"))
	require.NoError(t, err)
	request.SetBasicAuth("ann", "")
	request.Header.Set("Idempotency-Key", "4711")
	response, err := pgtest.HTTP.Do(request)
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	require.Equal(t, "you said hello ", string(body))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// tooLate is a writer that takes so long that the session's hold is due.
type tooLate struct {
	http.ResponseWriter
	clock *pgtest.Clock
}

func (w tooLate) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w tooLate) Write(p []byte) (int, error) {
	w.clock.Advance(time.Hour)
	return w.ResponseWriter.Write(p)
}
