package httpmetered_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
)

// model stands for a server that streams its answer, for as long as ctx lasts.
func model(ctx context.Context, prompt string, send func(word string) error) {
	for _, word := range strings.Fields("you said " + prompt) {
		if ctx.Err() != nil || send(word+" ") != nil {
			return
		}
	}
}

// streamed is the record of an answer that was streamed.
type streamed struct {
	Text string `json:"text"`
}

// chat relays an answer whose cost is known at its end, once for each Idempotency-Key.
func chat(client *metered.Client, w http.ResponseWriter, r *http.Request) error {
	user, refused := signedIn(r)
	key, missing := httpmetered.Key(r)
	prompt, unread := io.ReadAll(http.MaxBytesReader(w, r.Body, 10_000))
	if err := cmp.Or(refused, missing, unread); err != nil {
		return err
	}
	words := budget.ScopeKey("words", user, "")
	s, err := metered.Open[streamed](r.Context(), client, metered.Reservation{
		ID: key, Tenant: user, Name: "chat", Input: prompt,
		Lines:   []holds.Line{{Scope: words, Amount: 100, Limits: []budget.Limit{budget.Per(150, budget.Month, time.UTC, time.Time{})}}},
		Charges: []budget.Charge{{Scope: budget.ScopeKey("requests", user, ""), Amount: 1, Limits: []budget.Limit{budget.PerWindow(60, time.Minute)}}},
		// Bounds the wait of Open. The work may take longer.
		OpenTimeout: 30 * time.Second,
	})
	if err != nil {
		return err // 402, 409 and 429 with Retry-After, 422, 503
	}
	defer s.Close()
	if s.Finished() {
		_, err = io.WriteString(w, s.Outcome().Result.Text)
		return err
	}
	answer, flush := "", http.NewResponseController(w)
	model(s.Context(), string(prompt), func(word string) error { // until the client is gone, or the reservation
		answer += word
		_, err := io.WriteString(w, word)
		return cmp.Or(err, flush.Flush())
	})
	// The request's context may have ended with its client. The streamed part is settled all the same.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 10*time.Second)
	defer cancel()
	used := metered.Cost{Lines: []holds.Line{{Scope: words, Amount: int64(len(strings.Fields(answer)))}}, Over: holds.OverAllowed}
	_, err = s.Settle(ctx, used, func(context.Context, *metered.Tx) (streamed, error) { return streamed{answer}, nil })
	if err != nil && answer != "" { // the answer has begun: the client hears of it by the cut
		log.Print(err)
		panic(http.ErrAbortHandler)
	}
	return err
}

// A streaming endpoint reserves the most that an answer may cost, relays the answer, and settles the relayed part,
// also if the client hangs up. A second request with the same Idempotency-Key gets the record, or 409 and Retry-After
// while the first is being answered.
func Example_stream() {
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := chat(client, w, r); err != nil {
			httpmetered.Write(w, err)
		}
	}))
	defer server.Close()
	for _, key := range []string{"4711", "4711", "4712"} {
		request, _ := http.NewRequest("POST", server.URL, strings.NewReader("hello there"))
		request.SetBasicAuth("ann", "")
		request.Header.Set("Idempotency-Key", `"`+key+`"`)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			log.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		fmt.Printf("%d %q\n", response.StatusCode, body)
	}
	usage, err := client.Budget.Usage(context.Background(), pool, budget.Query{Scope: budget.ScopeKey("words", "ann", "")})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(usage[0].Used, "words used,", usage[0].Held, "reserved")
	// Output:
	// 200 "you said hello there "
	// 200 "you said hello there "
	// 200 "you said hello there "
	// 8 words used, 0 reserved
}
