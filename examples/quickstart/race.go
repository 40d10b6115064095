package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/tokens"
)

const (
	racing    = "racers" // the account
	racers    = 64
	room      = 10
	raceBytes = 100 // of each upload
)

func (s *story) race(ctx context.Context) {
	s.title(fmt.Sprintf("A race: %d uploads at once, room for %d", racers, room))
	requests := s.prepareRace(ctx)
	answers := make([]answer, racers)
	errs := make([]error, racers)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			<-start
			answers[i], errs[i] = s.client.upload(ctx, requests[i])
		})
	}
	close(start)
	wg.Wait()
	ok(cmp.Or(errs...))
	byStatus := map[int]int{}
	for _, a := range answers {
		byStatus[a.status]++
	}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		s.line("%d answers with status %d", byStatus[status], status)
	}
	check(s.report, "let in", byStatus[http.StatusCreated], room)
	check(s.report, "refused", byStatus[http.StatusTooManyRequests], racers-room)
	s.raceInDatabase(ctx, requests)
}

func (s *story) prepareRace(ctx context.Context) []sent {
	requests := make([]sent, racers)
	grants := make([]grant, racers)
	for i := range requests {
		f := file{fmt.Sprintf("racer-%02d.txt", i+1), fmt.Appendf(nil, "%-*d", raceBytes, i+1)}
		requests[i] = sent{operation: metered.NewID(), account: racing, file: f}
		grants[i] = grant{f.Name, len(f.Content)}
	}
	minted := must(s.app.mint(ctx, racing, grants...))
	for i, m := range minted {
		requests[i].token = m.Token.Reveal()
	}
	return requests
}

// raceInDatabase checks the outcome where it counts, not by the answers.
func (s *story) raceInDatabase(ctx context.Context, requests []sent) {
	scope := scopeOf(racing)
	var last budget.Entry
	for e, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{}) {
		ok(err)
		last = e
	}
	check(s.report, "entries in the ledger", last.Seq, room)
	check(s.report, "bytes spent", last.Spent, room*raceBytes)
	unspent := 0
	for _, r := range requests {
		_, err := s.inspect(ctx, r)
		if err == nil {
			unspent++
		} else if !errors.Is(err, tokens.ErrInvalid) {
			ok(err)
		}
	}
	check(s.report, "tokens still unspent", unspent, racers-room)
	var rows int
	ok(s.db.Pool.QueryRow(ctx, `select count(*) from uploads where account = $1`, racing).Scan(&rows))
	check(s.report, "rows stored", rows, room)
}
