package httpmetered_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/tokens"
)

// signedIn stands for your sessions.
func signedIn(r *http.Request) (string, error) {
	if user, _, ok := r.BasicAuth(); ok {
		return user, nil
	}
	return "", &httpmetered.Problem{Status: http.StatusUnauthorized, Detail: "please sign in"}
}

// createOrder takes an order: its row, its charge and its answer are there together, once for each Idempotency-Key.
func createOrder(w http.ResponseWriter, r *http.Request) {
	var order struct {
		ID   int64  `json:"id"`
		Item string `json:"item"`
	}
	if err := json.NewDecoder(r.Body).Decode(&order); err != nil {
		httpmetered.Write(w, &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "want an item"})
		return
	}
	err := httpmetered.Tx(r).QueryRow(r.Context(), `insert into orders (item) values ($1) returning id`, order.Item).Scan(&order.ID)
	if err != nil {
		httpmetered.Write(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(order)
}

// An endpoint whose requests can be sent again: the first answer comes back, and one order is made.
func ExampleIdempotent() {
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	once, err := httpmetered.Idempotent(client, httpmetered.IdempotentConfig{
		Tenant: signedIn, Documentation: "https://example.com/idempotency",
		Command: func(r *http.Request, _ []byte) (metered.Command, error) {
			user, err := signedIn(r)
			return metered.Command{Charges: []budget.Charge{{
				Scope: budget.ScopeKey("orders", user, ""), Amount: 1, Limits: []budget.Limit{budget.PerWindow(2, time.Hour)},
			}}}, err
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once(http.HandlerFunc(createOrder)))

	for _, send := range []struct{ key, item string }{{"a", "tea"}, {"a", "tea"}, {"a", "rum"}, {"b", "tea"}, {"c", "tea"}, {"", "tea"}} {
		r := httptest.NewRequest("POST", "/orders", strings.NewReader(fmt.Sprintf(`{"item": %q}`, send.item)))
		r.SetBasicAuth("ann", "secret")
		if send.key != "" {
			r.Header.Set("Idempotency-Key", send.key)
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		fmt.Printf("%q %s %d %q %q\n", send.key, send.item, w.Code, w.Header().Get("Idempotent-Replayed"), w.Header().Get("Link"))
	}
	// Output:
	// "a" tea 201 "" ""
	// "a" tea 201 "true" ""
	// "a" rum 422 "" "<https://example.com/idempotency>; rel=\"describedby\""
	// "b" tea 201 "" ""
	// "c" tea 429 "" ""
	// "" tea 400 "" "<https://example.com/idempotency>; rel=\"describedby\""
}

// address is the key of a client that is not signed in. Behind a proxy, take the address that the proxy vouches for.
func address(r *http.Request) (string, error) {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	return host, err
}

// A limit in front of a handler: counted exactly, over any number of processes.
func ExampleLimit() {
	pool, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httpmetered.Limit(pool, ledger, httpmetered.LimitConfig{
		Kind: "api", Key: address, Limits: []budget.Limit{budget.PerWindow(2, time.Hour).Named("hourly")},
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := limit(http.NotFoundHandler())
	for range 3 {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		left, _, _ := strings.Cut(w.Header().Get("RateLimit"), ";t=")
		fmt.Println(w.Code, left, "come back later:", w.Header().Get("Retry-After") != "")
	}
	// Output:
	// 404 "hourly";r=1 come back later: false
	// 404 "hourly";r=0 come back later: false
	// 429 "hourly";r=0 come back later: true
}

// A program's own refusals are errors, and answered in the same way as the library's.
func ExampleWrite() {
	errSoldOut := &httpmetered.Problem{Status: http.StatusConflict, Code: "sold_out", Detail: "no more of these"}
	for _, err := range []error{fmt.Errorf("order: %w", errSoldOut), budget.ErrConflict, errors.New("a secret")} {
		w := httptest.NewRecorder()
		httpmetered.Write(w, err)
		fmt.Print(w.Body)
	}
	// Output:
	// {"title":"Conflict","status":409,"detail":"no more of these","code":"sold_out"}
	// {"title":"Unprocessable Entity","status":422,"code":"operation_conflict"}
	// {"title":"Internal Server Error","status":500}
}

// An API has errors in a form of its own, and each of its projects has a budget: the partition key names the project
// to the client.
func ExamplePolicies_ShowRefusal() {
	pool, done := exampleDatabaseAt(time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC))
	defer done()
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		log.Fatal(err)
	}
	limits := []budget.Limit{budget.PerWindow(2, time.Minute).Named("renders")}
	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: limits})
	if err != nil {
		log.Fatal(err)
	}
	render := func(w http.ResponseWriter, r *http.Request) error {
		project := r.PathValue("project")
		of, err := policies.Partition([]byte(project)) // up to 32 bytes. Use the SHA-256 of longer names
		if err != nil {
			return err
		}
		posted, err := ledger.ChargeNow(r.Context(), pool, budget.Charge{Scope: budget.ScopeKey("renders", project, ""), Amount: 1, Limits: limits})
		var exceeded *budget.ExceededError
		if errors.As(err, &exceeded) {
			of.ShowRefusal(w.Header(), exceeded)
		}
		if err != nil {
			return err
		}
		of.Show(w.Header(), budget.Receipt{Entries: []budget.Posted{posted}})
		_, err = w.Write([]byte("<svg/>"))
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /projects/{project}/logo", func(w http.ResponseWriter, r *http.Request) {
		if err := render(w, r); err != nil {
			problem := policies.ProblemOf(err)
			if problem.RetryAfterSeconds > 0 {
				w.Header().Set("Retry-After", fmt.Sprint(problem.RetryAfterSeconds))
			}
			w.WriteHeader(problem.Status)
			_ = json.NewEncoder(w).Encode(map[string]any{"error": problem.Code, "limits": problem.ViolatedPolicies})
		}
	})
	for range 3 {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest("GET", "/projects/alps/logo", nil))
		fmt.Printf("%d %s\n%s\n", w.Code, w.Header().Get("RateLimit"), strings.TrimSpace(w.Body.String()))
	}
	// Output:
	// 200 "renders";r=1;t=60;pk=:YWxwcw==:
	// <svg/>
	// 200 "renders";r=0;t=60;pk=:YWxwcw==:
	// <svg/>
	// 429 "renders";r=0;t=60;pk=:YWxwcw==:
	// {"error":"budget_exceeded","limits":["renders"]}
}

// An endpoint whose answer has a link with a token. What is stored has the link's place, and Reveal puts the link into each answer.
func ExampleIdempotentConfig_reveal() {
	pool, done := exampleDatabase()
	defer done()
	key := make([]byte, 32) // from your secrets, in a program
	_, _ = rand.Read(key)
	client, err := metered.New(pool, metered.Config{SecretKey: key})
	if err != nil {
		log.Fatal(err)
	}
	once, err := httpmetered.Idempotent(client, httpmetered.IdempotentConfig{
		Tenant: signedIn,
		Reveal: func(_ *http.Request, secret func(label string) (tokens.Secret, error), body []byte) ([]byte, error) {
			link, err := secret("link")
			if err != nil {
				return nil, err
			}
			token, err := client.Tokens.Token(link)
			return bytes.ReplaceAll(body, []byte("TOKEN"), []byte(token.Reveal())), err
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	invite := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx := httpmetered.Tx(r)
		secret, err := tx.Secret("link")
		if err == nil {
			_, err = client.Tokens.Mint(r.Context(), tx, tokens.Mint{Purpose: "join", Subject: "team-7", Secret: secret})
		}
		if err != nil {
			httpmetered.Write(w, err)
			return
		}
		_, _ = io.WriteString(w, "https://example.com/join/TOKEN")
	}))
	var links []string
	for range 2 {
		r := httptest.NewRequest("POST", "/invitations", nil)
		r.SetBasicAuth("ann", "secret")
		r.Header.Set("Idempotency-Key", "a")
		w := httptest.NewRecorder()
		invite.ServeHTTP(w, r)
		links = append(links, w.Body.String())
	}
	fmt.Println(links[0] == links[1], strings.Contains(links[0], "TOKEN"))
	op, err := client.Lookup(context.Background(), pool, "ann", "a")
	fmt.Println(strings.Contains(string(op.Result), "join/TOKEN"), err)
	// Output:
	// true false
	// true <nil>
}
