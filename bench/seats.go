package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
)

var seatFigures = []figure{
	{"seats_http_hold_p95", "ms", atMost(200), "examples/seats over HTTP: 100 holds/s on one event for 60 s, each given back 3 s later, from when it was to be sent until its answer",
		seatsOverHTTP},
}

const (
	seatsRate    = 100 // holds per second
	seatsKept    = 3 * time.Second
	seatsUserMax = 10 // holds of one user in five minutes
	seatsViewers = 20
)

// seatsOverHTTP runs two processes of examples/seats on one database, and sends holds at a fixed
// rate, however long their answers take. It gives each seat back after a while, so that 500 seats
// are enough. Some browsers watch.
func seatsOverHTTP(ctx context.Context, b *bench) (out samples, err error) {
	if !b.thorough {
		return samples{}, notRun("a short run leaves it out, unless it is named")
	}
	s, err := b.open(ctx, options{})
	if err != nil {
		return out, err
	}
	defer s.drop()
	h := &seatsHall{client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}, Timeout: 30 * time.Second}}
	defer h.client.CloseIdleConnections()
	ctx, stop := context.WithCancel(ctx)
	defer h.background.Wait()
	defer stop()
	dir, err := os.MkdirTemp("", "metered-bench-seats-")
	if err != nil {
		return out, err
	}
	defer os.RemoveAll(dir)
	if err := h.start(ctx, filepath.Join(dir, "seats"), s.url); err != nil {
		return out, err
	}
	warm, holds := seatsRate*b.pick(5, 1), seatsRate*b.pick(60, 5)
	if err := h.fill(ctx, s, (warm+holds)/seatsUserMax); err != nil {
		return out, err
	}
	for i := range seatsViewers {
		h.view(ctx, i)
	}
	if _, err := h.load(ctx, 0, warm); err != nil {
		return out, err
	}
	w, err := newWatch(ctx, "seats", s)
	if err != nil {
		return out, err
	}
	defer w.close()
	if err := w.note(ctx, 0, false); err != nil {
		return out, err
	}
	l, err := h.load(ctx, warm, holds)
	if err := errors.Join(err, w.note(ctx, len(l.hold), true)); err != nil {
		return out, err
	}
	out.where = []profile{w.profile([]float64{float64(len(l.hold)) / l.seconds})}
	out.values = []float64{quantile(l.hold, 0.95)}
	out.note = fmt.Sprintf("%d holds at %s/s, all of them answered 201; p50 %s ms, p99 %s ms; 2 processes, %d browsers watching",
		len(l.hold), number(float64(len(l.hold))/l.seconds), number(quantile(l.hold, 0.5)), number(quantile(l.hold, 0.99)), seatsViewers)
	return out, nil
}

// seatsHall is the running program, with signed-in users.
type seatsHall struct {
	client     *http.Client
	bases      []string
	event      string
	free       chan string // seats
	cookies    []*http.Cookie
	background sync.WaitGroup
}

func (h *seatsHall) start(ctx context.Context, binary, database string) error {
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, "github.com/pgmetered/metered/examples/seats").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w: %s", err, out)
	}
	for range 2 {
		p := exec.CommandContext(ctx, binary, "-listen", "127.0.0.1:0")
		p.Env = append(os.Environ(), "DATABASE_URL="+database)
		p.Cancel = func() error { return p.Process.Signal(os.Interrupt) }
		p.WaitDelay = 20 * time.Second
		stdout, err := p.StdoutPipe()
		if err != nil {
			return err
		}
		if err := p.Start(); err != nil {
			return err
		}
		base := ""
		for lines := bufio.NewScanner(stdout); base == "" && lines.Scan(); {
			_, base, _ = strings.Cut(lines.Text(), "open ")
		}
		h.background.Go(func() {
			_, _ = io.Copy(io.Discard, stdout)
			_ = p.Wait()
		})
		if base == "" {
			return errors.New("examples/seats did not start")
		}
		h.bases = append(h.bases, base)
	}
	return nil
}

// fill makes the users and signs them in.
func (h *seatsHall) fill(ctx context.Context, s *site, users int) error {
	if err := s.QueryRow(ctx, `select id::text from hall.events order by name limit 1`).Scan(&h.event); err != nil {
		return err
	}
	rows, _ := s.Query(ctx, `select id::text from hall.seats where event = $1 order by md5(id::text)`, h.event) // the error is that of the rows
	seats, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	h.free = make(chan string, len(seats))
	for _, seat := range seats {
		h.free <- seat
	}
	h.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for i := range users {
		user := metered.NewID()
		if _, err := s.Exec(ctx, `insert into hall.users select $1, org, 'bench' from hall.events where id = $2`, user, h.event); err != nil {
			return err
		}
		response, err := h.client.PostForm(h.bases[i%2]+"/login", url.Values{"user": {user}})
		if err != nil {
			return err
		}
		response.Body.Close()
		if len(response.Cookies()) != 1 {
			return fmt.Errorf("login: %s", response.Status)
		}
		h.cookies = append(h.cookies, response.Cookies()[0])
	}
	return nil
}

// view is a browser that watches.
func (h *seatsHall) view(ctx context.Context, user int) {
	h.background.Go(func() {
		request, _ := http.NewRequestWithContext(ctx, http.MethodGet, h.bases[user%2]+"/api/events/"+h.event+"/stream", nil)
		request.AddCookie(h.cookies[user%len(h.cookies)])
		if response, err := (&http.Client{}).Do(request); err == nil {
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		}
	})
}

// seatsLoad is the result of a load, in milliseconds.
type seatsLoad struct {
	hold    []float64
	seconds float64
}

// load sends holds number from to from+n, each at its time. Every one has to succeed.
func (h *seatsHall) load(ctx context.Context, from, n int) (l seatsLoad, err error) {
	var mu sync.Mutex
	var requests sync.WaitGroup
	began := time.Now()
	for i := range n {
		at := began.Add(time.Duration(i) * time.Second / seatsRate)
		if time.Sleep(time.Until(at)); ctx.Err() != nil {
			break
		}
		requests.Go(func() {
			held, one := h.holdAndCancel(ctx, from+i, at)
			mu.Lock()
			defer mu.Unlock()
			if err = errors.Join(err, one); one == nil {
				l.hold = append(l.hold, held)
			}
		})
	}
	l.seconds = time.Since(began).Seconds()
	requests.Wait()
	return l, errors.Join(err, ctx.Err())
}

// holdAndCancel is one hold, counted from when it was to be sent.
func (h *seatsHall) holdAndCancel(ctx context.Context, i int, at time.Time) (held float64, err error) {
	var seat string
	select {
	case seat = <-h.free:
	case <-ctx.Done(): // if none is free the program is behind, which counts
		return 0, ctx.Err()
	}
	cookie := h.cookies[i/seatsUserMax]
	answer, err := ask(ctx, h.client, http.MethodPost, h.bases[i%2]+"/api/events/"+h.event+"/seats/"+seat+"/hold", cookie, http.StatusCreated)
	held = time.Since(at).Seconds() * 1000
	if err != nil {
		return 0, err
	}
	time.Sleep(seatsKept)
	_, rest, _ := strings.Cut(answer, `"hold_id":"`)
	hold, _, _ := strings.Cut(rest, `"`)
	_, err = ask(ctx, h.client, http.MethodDelete, h.bases[(i+1)%2]+"/api/holds/"+hold, cookie, http.StatusOK)
	h.free <- seat
	return held, err
}
