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

func (s *story) race(ctx context.Context) error {
	s.title(fmt.Sprintf("A race: %d uploads at once, room for %d", racers, room))
	requests, err := s.prepareRace(ctx)
	if err != nil {
		return err
	}
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
	if err := cmp.Or(errs...); err != nil {
		return err
	}
	byStatus := map[int]int{}
	for _, a := range answers {
		byStatus[a.status]++
	}
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		s.line("%d answers with status %d", byStatus[status], status)
	}
	check(s.report, "let in", byStatus[http.StatusCreated], room)
	check(s.report, "refused", byStatus[http.StatusTooManyRequests], racers-room)
	return s.raceInDatabase(ctx, requests)
}

func (s *story) prepareRace(ctx context.Context) ([]sent, error) {
	requests := make([]sent, racers)
	grants := make([]grant, racers)
	for i := range requests {
		f := file{fmt.Sprintf("racer-%02d.txt", i+1), fmt.Appendf(nil, "%-*d", raceBytes, i+1)}
		requests[i] = sent{operation: metered.NewID(), account: racing, file: f}
		grants[i] = grant{f.Name, len(f.Content)}
	}
	minted, err := s.app.mint(ctx, racing, grants...)
	if err != nil {
		return nil, err
	}
	for i, m := range minted {
		requests[i].token = m.Token.Reveal()
	}
	return requests, nil
}

// raceInDatabase checks the outcome where it counts, not by the answers.
func (s *story) raceInDatabase(ctx context.Context, requests []sent) error {
	scope := scopeOf(racing)
	var last budget.Entry
	for e, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{}) {
		if err != nil {
			return err
		}
		last = e
	}
	check(s.report, "entries in the ledger", last.Seq, room)
	check(s.report, "bytes spent", last.Spent, room*raceBytes)
	unspent := 0
	for _, r := range requests {
		_, err := s.inspect(ctx, r)
		if err != nil && !errors.Is(err, tokens.ErrInvalid) {
			return err
		}
		if err == nil {
			unspent++
		}
	}
	check(s.report, "tokens still unspent", unspent, racers-room)
	var rows int
	err := s.db.Pool.QueryRow(ctx, `select count(*) from uploads where account = $1`, racing).Scan(&rows)
	check(s.report, "rows stored", rows, room)
	return err
}
