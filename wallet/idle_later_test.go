package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// eachSQL makes the fold of a wallet's time skip nothing.
const eachSQL = `
create or replace function metered._advance(inout tip metered.ledger, until timestamptz, lowered jsonb, unwritten metered.unwritten[], lines metered.due_line[],
    inout lots metered.lots[], inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record := metered._advance_each(tip, until, lowered, unwritten, lines, lots, parts, debts, spent);
begin
    tip := step.tip;
    lots := step.lots;
    parts := step.parts;
    debts := step.debts;
    spent := step.spent;
    entries := step.entries;
    moves := step.moves;
end
$$`

var refusals = []error{budget.ErrRefundExceeds, budget.ErrEntryPurged, wallet.ErrConflict, wallet.ErrExpired, wallet.ErrUnknownLot}

// sleeper is a wallet that lives one history twice: where idle plans are skipped, and where they are not.
type sleeper struct {
	*testing.T
	r     *rand.Rand
	twice [2]*fixture
	scope string
	now   time.Time
	seqs  [2][]int64 // of its draws
	drew  []int64    // their units
	plans []string
	names []string // of lots
	told  []string
}

func (s *sleeper) advance(by time.Duration) {
	s.now = s.now.Add(by)
	s.told = append(s.told, "advance "+by.String()+" to "+s.now.Format(time.RFC3339))
	for _, f := range s.twice {
		f.clock.Set(s.now)
	}
}

// both makes one call twice, and compares what is said.
func (s *sleeper) both(what string, call func(i int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error)) {
	s.Helper()
	var said [2]string
	for i, f := range s.twice {
		answer, err := do(f, func(ctx context.Context, tx pgx.Tx) (any, error) { return call(i, ctx, tx, f) })
		said[i] = fmt.Sprintf("%+v", answer)
		if err != nil {
			said[i] = s.refused(err)
		}
		said[i] += " " + strings.Join(f.crossed(), ", ")
	}
	s.told = append(s.told, what+": "+said[0])
	require.Equal(s, said[1], said[0], "%s", strings.Join(s.told, "\n"))
}

func (s *sleeper) refused(err error) string {
	for _, known := range refusals {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return err.Error()
	}
	return fmt.Sprintf("%+v", exceeded.Refusals)
}

// looks compares what Balance shows, and the sums of the last entries.
func (s *sleeper) looks() {
	s.Helper()
	s.both("balance", func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
		b, err := f.book.Balance(ctx, tx, s.scope)
		b.Seq = 0
		for i := range b.Lots {
			b.Lots[i].Lot = 0
			if name := b.Lots[i].Reference; name != "" && !slices.Contains(s.names, name) {
				s.names = append(s.names, name)
			}
		}
		return b, err
	})
}

// sums compares what all entries together did, once all is written.
func (s *sleeper) sums(purged bool) {
	s.Helper()
	s.both("sums", func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
		var sums [8]int64
		err := tx.QueryRow(ctx, `select l.credited, l.spent, l.refunded, l.held, (select coalesce(sum(h.amount), 0) from metered.lot_holds h where h.scope = l.scope),
			(select coalesce(sum(y.lapsed), 0) from metered.lots y where y.scope = l.scope and not $2),
			(select coalesce(sum(y.untold), 0) from metered.lots y where y.scope = l.scope and not $2),
			(select coalesce(sum(y.amount - y.pending), 0) from metered.lots y where y.scope = l.scope and y.origin = 'g' and not $2)
			from metered.ledger l where l.scope = $1 order by l.seq desc limit 1`, s.scope, purged).
			Scan(&sums[0], &sums[1], &sums[2], &sums[3], &sums[4], &sums[5], &sums[6], &sums[7])
		return sums, err
	})
}

func (s *sleeper) draw(amount int64, use string) {
	s.Helper()
	s.drew = append(s.drew, amount)
	s.both(fmt.Sprint("draw ", amount, " ", use), func(i int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
		d, err := f.drawIn(ctx, tx, toDraw{Wallet: s.scope, Amount: amount, Note: budget.Note{Use: use}})
		s.seqs[i] = append(s.seqs[i], d.Seq)
		return []any{d.Amount, d.Overdrawn}, err
	})
}

func (s *sleeper) refund(nth int) {
	s.Helper()
	amount := 1 + s.r.Int64N(s.drew[nth])
	s.both(fmt.Sprint("refund ", amount, " of draw ", nth), func(i int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
		if s.seqs[i][nth] == 0 {
			return nil, wallet.ErrUnknownLot
		}
		p, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: s.scope, Seq: s.seqs[i][nth], Amount: amount})
		return p.Amount, err
	})
}

// act makes a random call.
func (s *sleeper) act(n int) {
	s.Helper()
	name := append(s.names, "no lot")[s.r.IntN(len(s.names)+1)]
	plan := s.plans[s.r.IntN(len(s.plans))]
	units, ends := s.r.Int64N(6)*s.r.Int64N(2), s.now.Add(time.Duration(s.r.IntN(200)+1)*time.Hour)
	switch k := s.r.IntN(12); k {
	case 0, 1:
		s.draw(1+s.r.Int64N(12), []string{"", "images"}[s.r.IntN(2)])
	case 2:
		if len(s.drew) > 0 {
			s.refund(s.r.IntN(len(s.drew)))
		}
	case 3, 4:
		s.both(fmt.Sprint("revoke ", units, " of ", name), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			r := wallet.Revoke{Wallet: s.scope, Reference: name, Amount: units}
			if k == 3 {
				r = wallet.Revoke{Wallet: s.scope, Reference: plan, Renewals: true}
			}
			a, err := f.book.Revoke(ctx, tx, r)
			return []any{a.Amount, a.Missing}, err
		})
	case 5:
		s.both(fmt.Sprint("reinstate ", name, " and ", plan), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			r := wallet.Revoke{Wallet: s.scope, Reference: name}
			if units > 0 {
				r = wallet.Revoke{Wallet: s.scope, Reference: plan, Renewals: true}
			}
			a, err := f.book.Reinstate(ctx, tx, r)
			return []any{a.Amount, a.Expires, a.Replayed}, err
		})
	case 6:
		s.both(fmt.Sprint("end ", name, " at ", ends), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			a, err := f.book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: s.scope, Reference: name, Expires: ends})
			return []any{a.Amount, a.Expires, a.Replayed}, err
		})
	case 7:
		s.both(fmt.Sprint("roll ", name, " over"), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			a, err := f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: s.scope, Reference: name, Cap: 3, For: 40 * time.Hour})
			if a.Replayed || err == nil && a.Amount == 0 {
				return nil, err // of a skipped period nobody knows any more how many units went on
			}
			return []any{a.Amount, a.Expires}, err
		})
	case 8:
		change := wallet.Change{Wallet: s.scope, Reference: fmt.Sprint("change", n), Plan: plan, AtEnd: s.r.IntN(2) == 0}
		if s.r.IntN(2) == 0 {
			change.To = &wallet.Grant{Amount: 4, Ends: wallet.EachPeriod(daily)}
		}
		s.both(fmt.Sprintf("change %+v", change), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			a, err := f.book.Change(ctx, tx, change)
			return a.String() + a.Ends.String(), err
		})
		s.plans = append(s.plans, change.Reference)
	case 9:
		o := wallet.Overage{Wallet: s.scope, Plan: plan, Forgive: s.r.IntN(2) == 0}
		if s.r.IntN(2) == 0 {
			o.At = s.now.Add(-time.Duration(s.r.IntN(24*300)) * time.Hour)
		}
		s.both(fmt.Sprintf("overage %+v", o), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			a, err := f.book.Overage(ctx, tx, o)
			return []any{a.Amount, a.Expires, a.Replayed}, err
		})
	case 10:
		s.both("grant", func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			a, err := f.book.Grant(ctx, tx, wallet.Grant{Wallet: s.scope, Amount: 3, Reference: fmt.Sprint("later", n), Ends: wallet.At(ends)})
			return []any{a.Amount, a.Expires}, err
		})
	default:
		id := fmt.Sprint(s.scope, "/", n)
		s.both("hold", func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
			_, err := f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: 70 * time.Hour, Lines: []holds.Line{f.book.Line(s.scope, units+1)}})
			return nil, err
		})
	}
}

// somePlans are grants of plans as customers may have them.
func (s *sleeper) somePlans() (all []wallet.Grant) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(s, err)
	zone := []*time.Location{time.UTC, berlin}[s.r.IntN(2)]
	cap := s.r.Int64N(12) + 1
	for i := range s.r.IntN(3) + 1 {
		priority := s.r.IntN(2)
		period := budget.Per(1, budget.Day, zone, time.Time{}).Period
		g := wallet.Grant{Wallet: s.scope, Amount: s.r.Int64N(7) + 1, Reference: fmt.Sprint("plan", i), Category: []string{"", "other"}[s.r.IntN(2)], Priority: &priority}
		switch s.r.IntN(8) {
		case 0:
			period = budget.Per(1, budget.Week, zone, time.Time{}).Period
		case 1:
			period = budget.PerPeriod(1, 36*time.Hour, s.now).Period
		case 2:
			period = budget.Per(1, budget.Month, zone, time.Time{}).Period
		}
		g.Ends = wallet.EachPeriod(period)
		if s.r.IntN(4) == 0 {
			g.Ends = wallet.EachPeriodProrated(period)
		}
		if s.r.IntN(4) == 0 {
			g.Uses = []string{"images"}
		}
		if s.r.IntN(8) == 0 {
			g.Starts = s.now.Add(time.Duration(s.r.IntN(24*60)) * time.Hour)
		}
		if s.r.IntN(4) > 0 {
			g.Roll = &wallet.Roll{Cap: cap, Shared: s.r.IntN(3) > 0, Times: s.r.IntN(4), Lasts: wallet.For(time.Duration(s.r.IntN(96)+24) * time.Hour)}
			switch s.r.IntN(6) {
			case 0, 1:
				g.Roll.Lasts = wallet.ToEndOf(period)
			case 2:
				g.Roll.Lasts, g.Roll.Times = wallet.Span{}, 0
			}
			if g.Roll.Shared && g.Roll.Times > 0 && s.r.IntN(3) == 0 {
				g.Roll.Times = -1
			}
		}
		all = append(all, g)
	}
	return all
}

// After plans were idle, and what they repeat was skipped, each call says what it says where one event came after the other: late
// refunds, revocations, changes of ends and of plans, overage, holds, thresholds, a clock that is set back, and purges.
func TestIdle_CallsAfterItSayWhatTheyWouldHaveSaid(t *testing.T) {
	t.Parallel()
	cfg := wallet.Config{Overdraft: 7, LateRefunds: 30 * day, Thresholds: []budget.Threshold{{Name: "low", Left: 12, Rearm: 3}, {Name: "out", Rearm: 1}}}
	var twice [2]*fixture
	for i := range twice {
		twice[i] = setUpReporting(t, cfg, nil)
	}
	_, err := twice[1].pool.Exec(t.Context(), eachSQL)
	require.NoError(t, err)
	skipped := 0
	for n := range pgtest.Size(2, 300) {
		s := &sleeper{T: t, r: rand.New(rand.NewPCG(45, uint64(n))), twice: twice, scope: fmt.Sprint("w", n), names: []string{"paid"}}
		s.now = noon.Add(time.Duration(s.r.IntN(24*365)) * time.Hour)
		s.advance(0)
		grants := append(s.somePlans(), wallet.Grant{Wallet: s.scope, Amount: 9, Reference: "paid", Ends: wallet.After(time.Duration(s.r.IntN(80)+1) * day)})
		for _, g := range grants {
			if g.Reference != "paid" {
				s.plans, s.names = append(s.plans, g.Reference), append(s.names, g.Reference)
			}
			s.both(fmt.Sprintf("grant %+v roll %+v", g, g.Roll), func(_ int, ctx context.Context, tx pgx.Tx, f *fixture) (any, error) {
				a, err := f.book.Grant(ctx, tx, g)
				return []any{a.Amount, a.Expires}, err
			})
		}
		s.draw(1+s.r.Int64N(9), "")
		s.advance(time.Duration(s.r.IntN(24*5)) * time.Hour)
		s.looks()
		s.draw(1+s.r.Int64N(9), "images")
		if s.r.IntN(3) == 0 {
			s.act(-1)
		}
		s.advance(time.Duration(s.r.IntN(24*150)+24*30) * time.Hour)
		s.looks()
		purged := false
		for step := range 5 {
			s.act(step)
			s.looks()
			switch s.r.IntN(6) {
			case 0:
				s.advance(-time.Duration(s.r.IntN(50)) * time.Hour)
			case 1:
				purged = true // what remains of lots that ended depends on how many entries a wallet has
				s.names, s.drew, s.seqs = nil, nil, [2][]int64{}
				for _, f := range s.twice {
					_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 30 * day})
					require.NoError(t, err)
				}
				s.looks()
			default:
				s.advance(time.Duration(s.r.IntN(100)) * time.Hour)
			}
		}
		s.advance(80 * time.Hour) // also where the clock was set back
		for _, f := range s.twice {
			f.expire()
		}
		s.both("sweep", func(int, context.Context, pgx.Tx, *fixture) (any, error) { return nil, nil })
		s.looks()
		s.sums(purged)
		var entries [2]int
		for i, f := range s.twice {
			require.NoError(t, f.pool.QueryRow(t.Context(), "select count(*) from metered.ledger where scope = $1", s.scope).Scan(&entries[i]))
		}
		if entries[0] < entries[1] {
			skipped++
		}
		t.Logf("%s: %d entries in place of %d", s.scope, entries[0], entries[1])
	}
	require.Greater(t, skipped, pgtest.Size(1, 100))
	for _, f := range twice {
		f.clock.Set(noon.AddDate(9, 0, 0)) // no hold of an earlier wallet is live
	}
}
