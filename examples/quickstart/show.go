package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/tokens"
)

// story is the state that the steps of the demonstration share.
type story struct {
	*report
	db     *exampledb.Database
	app    *app
	client *examplehttp.Client
	files  []upload // that nobody has sent yet
	first  struct { // upload, for the step that repeats it
		request upload
		answer  examplehttp.Answer
	}
}

const (
	account   = "acme"   // uploads the files. Its plan has room for them and for a few small ones later on
	racing    = "racers" // has an account of its own, with little room
	spare     = 1000
	racers    = 64
	room      = 10
	raceBytes = 100 // of each upload
)

func plansFor(files []upload) map[string]plan {
	hourly := int64(spare)
	for _, f := range files {
		hourly += cost(len(f.Content))
	}
	return map[string]plan{
		account: {Hourly: hourly, Daily: 3 * hourly},
		racing:  {Hourly: room * raceBytes, Daily: 3 * room * raceBytes},
	}
}

// prepare mints a grant for each file, and returns the requests that would redeem them.
func (s *story) prepare(ctx context.Context, account string, files ...upload) (requests []upload) {
	var grants []grant
	for _, f := range files {
		grants = append(grants, grant{f.Name, len(f.Content)})
	}
	for i, m := range must(s.app.mint(ctx, account, grants...)) {
		requests = append(requests, upload{metered.NewID(), account, m.Token.Reveal(), files[i].Name, files[i].Content})
	}
	return requests
}

func (s *story) send(ctx context.Context, u upload) examplehttp.Answer {
	path := fmt.Sprintf("/accounts/%s/uploads/%s", url.PathEscape(u.Account), url.PathEscape(u.Name))
	return s.client.Do(ctx, http.MethodPost, path, u.Content, "Authorization", "Bearer "+u.Token, "Idempotency-Key", u.Operation)
}

func (s *story) uploads(ctx context.Context) {
	s.title("Uploads: one grant per file, redeemed over HTTP")
	p := s.app.plans[account]
	s.line("%s may upload %d bytes an hour, %d a day", account, p.Hourly, p.Daily)
	for i, request := range s.prepare(ctx, account, s.files...) {
		a := s.send(ctx, request)
		check(s.report, request.Name+" stored, status", a.Status, http.StatusCreated)
		if i == 0 {
			s.first.request, s.first.answer = request, a
		}
	}
	s.awaitWorkers(ctx)
	described := 0
	ok(s.db.Pool.QueryRow(ctx, `select count(*) from uploads where sha256 = sha256(content) and media_type <> ''`).Scan(&described))
	check(s.report, "rows with the digest that the worker found", described, len(s.files))
}

// awaitWorkers returns when River's workers have described every upload.
func (s *story) awaitWorkers(ctx context.Context) {
	ctx, cancel := context.WithTimeoutCause(ctx, 15*time.Second, errors.New("the workers did not finish"))
	defer cancel()
	ok(exampledb.Await(ctx, func() (done bool, err error) {
		err = s.db.Pool.QueryRow(ctx, `select not exists (select from uploads where sha256 is null)`).Scan(&done)
		return done, err
	}))
}

func (s *story) repeats(ctx context.Context) {
	s.title("The same again")
	before := must(count(ctx, s.db.Pool))
	again := s.send(ctx, s.first.request)
	check(s.report, "same operation, status", again.Status, http.StatusOK)
	check(s.report, "its answer is the first one", again.Body, s.first.answer.Body)
	changed, other := s.first.request, s.first.request
	changed.Content = []byte("something else\n")
	other.Operation = metered.NewID()
	for _, try := range []struct {
		what    string
		request upload
		want    int
	}{
		{"same operation with another file, status", changed, http.StatusUnprocessableEntity},
		{"same token for another operation, status", other, http.StatusForbidden},
	} {
		a := s.send(ctx, try.request)
		check(s.report, try.what, a.Status, try.want)
		s.line("        %s", a.Body)
	}
	var invalid *tokens.InvalidError
	_, err := s.inspect(ctx, s.first.request)
	if !errors.As(err, &invalid) {
		ok(fmt.Errorf("inspecting a used token: %w", err))
	}
	check(s.report, "the reason, for the server alone", invalid.Reason(), "used")
	s.unchanged(ctx, before)
}

func (s *story) overBudget(ctx context.Context) {
	s.title("Over budget")
	usage := must(s.app.metered.Budget.Usage(ctx, s.db.Pool, budget.Query{Scope: scopeOf(account), Window: time.Hour}))
	left := s.app.plans[account].Hourly - usage[0].Used
	s.line("used %d bytes in an hour: %d are left, and the next upload has one more", usage[0].Used, left)
	request := s.prepare(ctx, account, upload{Name: "too-large.bin", Content: make([]byte, left+1)})[0]
	before := must(count(ctx, s.db.Pool))
	a := s.send(ctx, request)
	check(s.report, "status", a.Status, http.StatusTooManyRequests)
	s.line("        %s", a.Body)
	s.unspent(ctx, request)
	s.unchanged(ctx, before)
}

func (s *story) race(ctx context.Context) {
	s.title(fmt.Sprintf("A race: %d uploads at once, room for %d", racers, room))
	files := make([]upload, racers)
	for i := range files {
		files[i] = upload{Name: fmt.Sprintf("racer-%02d.txt", i+1), Content: fmt.Appendf(nil, "%-*d", raceBytes, i+1)}
	}
	requests := s.prepare(ctx, racing, files...)
	byStatus := map[int]int{}
	for _, a := range exampledb.AtOnce(racers, func(i int) examplehttp.Answer { return s.send(ctx, requests[i]) }) {
		byStatus[a.Status]++
	}
	check(s.report, "answers with status 201", byStatus[http.StatusCreated], room)
	check(s.report, "answers with status 429", byStatus[http.StatusTooManyRequests], racers-room)
	unspent := 0
	for _, r := range requests {
		if _, err := s.inspect(ctx, r); err == nil {
			unspent++
		} else if !errors.Is(err, tokens.ErrInvalid) {
			ok(err)
		}
	}
	check(s.report, "tokens still unspent", unspent, racers-room)
}

// ledger prints every entry with the running sum after it, and has the library verify them all.
func (s *story) ledger(ctx context.Context) {
	s.awaitWorkers(ctx)
	s.title("The ledger, with its running sums")
	check(s.report, "bytes of the racers", s.chain(ctx, racing), room*raceBytes)
	spent := s.chain(ctx, account)
	check(s.report, "spent within the plan", spent <= s.app.plans[account].Hourly, true)
	verified := must(s.app.metered.Budget.Verify(ctx, s.db.Pool, budget.VerifyOptions{}))
	s.line("verified %d entries of %d scopes: %v", verified.Entries, verified.Scopes, verified.Differences)
	check(s.report, "differences", len(verified.Differences), 0)
	total := must(count(ctx, s.db.Pool))
	check(s.report, "one of each for every upload", total, counts{
		Entries: total.Rows, Operations: total.Rows, Spent: total.Rows, Rows: total.Rows, Jobs: total.Rows,
	})
}

// chain prints one account's entries.
func (s *story) chain(ctx context.Context, account string) (sum int64) {
	wrong := 0
	s.line("%s: number, amount, spent, time, reason", scopeOf(account))
	for e, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scopeOf(account), budget.EntriesOptions{}) {
		ok(err)
		if sum += e.Amount; e.Spent != sum { // there are only charges here
			wrong++
		}
		s.line("%6d %8d %8d  %s  %s", e.Seq, e.Amount, e.Spent, e.At.UTC().Format("15:04:05.000000"), e.Note.Reason)
	}
	check(s.report, "entries whose sum is wrong", wrong, 0)
	return sum
}
