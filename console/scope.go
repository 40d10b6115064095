package console

import (
	"context"
	"errors"
	"net/url"
	"strconv"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

const (
	entriesShown = 25
	holdsShown   = 25
	leasesShown  = 25
	lotsShown    = 25
	parkedShown  = 25
)

type scope struct {
	Name        string
	Unknown     bool // it has no entries, and was never declared
	D           inspect.ScopeDetail
	Limits      limits
	LimitsWrong string // the fault of the limits typed
	Standings   []inspect.Room
	Amount      string
	Use         string               // of the charge in question
	Explained   *inspect.Explanation // nil without a question
	Plots       []plotted
	Entries     []budget.Entry // newest first
	Before      int64          // they are those before this one, if not 0
	OlderThan   int64          // there are more before this one, if not 0
	Holds       []holds.Hold
	Leases      []leases.Lease
	Lots        []inspect.Lot     // of a wallet, newest first
	Parked      []inspect.Waiting // the first jobs that wait for the scope
}

// LotsLeft are the first lots of a wallet to be drawn that have something.
func (s scope) LotsLeft() []wallet.Lot {
	if s.D.Wallet == nil {
		return nil
	}
	return s.D.Wallet.Lots[:min(lotsShown, len(s.D.Wallet.Lots))]
}

// scope shows a scope. A viewer's input stays in the address, so that the page can be sent to
// somebody.
func (h *Handler) scope(ctx context.Context, in *inspect.Reader, q url.Values) (page, error) {
	s := scope{Name: q.Get("scope"), Amount: q.Get("amount"), Use: q.Get("use")}
	var err error
	s.D, err = in.Scope(ctx, s.Name)
	if s.Unknown = errors.Is(err, inspect.ErrUnknown); err != nil && !s.Unknown {
		return page{}, err
	}
	if s.Limits, s.LimitsWrong, err = h.limitsOf(ctx, in, s.Name, q.Get("limits")); err != nil {
		return page{}, err
	}
	if err := s.explain(ctx, in); err != nil {
		return page{}, err
	}
	p := page{Title: printable(s.Name), Active: "Scopes", Now: s.D.Now}
	if !s.Unknown {
		if err := s.fill(ctx, in, q); err != nil {
			return page{}, err
		}
		p.Stream = streamOf("scope", url.Values{"scope": {s.Name}, "limits": {s.Limits.Typed}})
	}
	p.Data = s
	return p, nil
}

// Prepaid reports whether the scope has credit: then it shows the credit that is left in place of
// the units used.
func (s scope) Prepaid() bool { return s.D.Credited > 0 }

// Left is the prepaid credit that nothing holds, less than 0 if it is overdrawn.
func (s scope) Left() int64 { return -s.D.Used - s.D.HeldNow - s.D.Leased }

// Timeline is the address of the drawing of the holds.
func (s scope) Timeline() string { return "holds.svg?" + url.Values{"scope": {s.Name}}.Encode() }

// explain gets the state of the limits by a charge of the amount typed, or of 1.
func (s *scope) explain(ctx context.Context, in *inspect.Reader) error {
	amount, err := strconv.ParseInt(s.Amount, 10, 64)
	asked := s.Amount != ""
	if !asked {
		amount = 1
	} else if err != nil || amount < 1 || amount > bounds.MaxAmount {
		s.LimitsWrong = "The amount is not a number of units from 1 to 2^53."
		return nil
	}
	if s.LimitsWrong != "" || !asked && len(s.Limits.List) == 0 {
		return nil
	}
	e, err := in.Explain(ctx, budget.Charge{Scope: s.Name, Amount: amount, Limits: s.Limits.List,
		Note: budget.Note{Use: s.Use}})
	if errors.Is(err, budget.ErrArgument) {
		s.LimitsWrong = "The use is not a text of up to 255 bytes."
		return nil
	}
	if err != nil {
		return err
	}
	for _, l := range e.Limits {
		stands := inspect.Room{Scope: s.Name, ExplainedLimit: l}
		if l.Limit.Prepaid {
			stands.Credited = s.D.Credited
		}
		s.Standings = append(s.Standings, stands)
	}
	if asked {
		s.Explained = &e
	}
	return nil
}

// fill reads the data of a scope that exists.
func (s *scope) fill(ctx context.Context, in *inspect.Reader, q url.Values) (err error) {
	if s.Before, err = strconv.ParseInt(q.Get("before"), 10, 64); err != nil || s.Before < 0 {
		s.Before = 0
	}
	for e, err := range in.Ledger.Entries(ctx, in.DB, s.Name,
		budget.EntriesOptions{NewestFirst: true, Before: s.Before, Max: entriesShown}) {
		if err != nil {
			return err
		}
		s.Entries = append(s.Entries, e)
	}
	if n := len(s.Entries); n == entriesShown && s.Entries[n-1].Seq > 1 {
		s.OlderThan = s.Entries[n-1].Seq
	}
	if q.Has("page") {
		return nil // it is a part of the page that is kept live: the rest is not
	}
	for _, limit := range s.Limits.List {
		plot, err := s.plotted(ctx, in, limit)
		if err != nil {
			return err
		}
		s.Plots = append(s.Plots, plot)
	}
	if s.Parked, err = in.Waiting(ctx, s.Name, parkedShown); err != nil {
		return err
	}
	held, err := in.Holds(ctx, inspect.HoldFilter{Scope: s.Name, Limit: holdsShown})
	if err != nil {
		return err
	}
	s.Holds = held.Holds
	out, err := in.Leases(ctx, inspect.LeaseFilter{Scope: s.Name, State: inspect.LeaseOpen,
		Limit: leasesShown})
	if s.Leases = out.Leases; err != nil || s.D.Wallet == nil {
		return err
	}
	lots, err := in.Lots(ctx, s.Name, "", lotsShown)
	s.Lots = lots.Lots
	return err
}
