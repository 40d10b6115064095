// Package twins compares wallets that were swept, purged and moved with one that nobody looked at.
package twins

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// Three wallets live one random history: the first is never swept, the second is swept each hour, and the third at
// random times, with purges. Each answer, each refusal, and each lot as Balance shows it is the same in all three, and
// in the order of draws. A failure names its steps: METERED_TWINS=seed/1/steps repeats them (seed/1/0/3,8,9 these alone), and METERED_SHORTEN=200 leaves
// steps out for as many tries. TestWallets_AgreeWithTheModel compares one wallet with the rules.
//
// Two seeds of 40 steps, with which mutants are run, find a reader that counts other lots than the writer ends, a name
// that is looked up before what is due, lots in the order of their numbers, and a call that leaves the end of its lot
// unwritten.
func TestTwins_NoAnswerDependsOnWhoLooked(t *testing.T) {
	t.Parallel()
	seeds, steps := pgtest.Size(1, 100), pgtest.Sizes(12, 25, 200)
	first := uint64(1)
	only := ""
	if text := os.Getenv("METERED_TWINS"); text != "" { // the first seed, how many of them, and how many steps, or which ones of them alone
		n, _ := fmt.Sscanf(text, "%d/%d/%d/%s", &first, &seeds, &steps, &only)
		require.GreaterOrEqual(t, n, 3)
	}
	for seed := first; seed < first+uint64(seeds); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			numbers := make([]int, steps)
			for n := range numbers {
				numbers[n] = n
			}
			if only != "" {
				require.NoError(t, json.Unmarshal([]byte("["+only+"]"), &numbers))
			}
			if found := live(t, seed, numbers); found != nil {
				t.Error(shortest(t, seed, found))
			}
		})
	}
}

// story is what a history was, up to a difference.
type story struct {
	steps      []int
	told       []string
	difference string
}

func (s *story) String() string {
	return fmt.Sprint("steps ", s.steps, ":\n", strings.Join(s.told, "\n"), "\n", s.difference)
}

// live plays some steps of a history. It returns nil if there was no difference.
func live(t *testing.T, seed uint64, steps []int) (found *story) {
	t.Run(fmt.Sprint(len(steps), " steps"), func(t *testing.T) {
		w := newTwins(t, seed)
		defer func() {
			d, ok := recover().(difference)
			if ok {
				found = &story{steps[:w.n+1], w.told, string(d)}
			}
		}()
		for n, step := range steps {
			w.n = n
			w.r = rand.New(rand.NewPCG(seed, uint64(step)))
			w.step(step)
		}
		w.end()
	})
	return found
}

// shortest leaves out steps as long as a difference is left.
func shortest(t *testing.T, seed uint64, s *story) *story {
	tries, _ := strconv.Atoi(os.Getenv("METERED_SHORTEN"))
	for size := max(1, len(s.steps)/2); size > 0 && tries > 0; {
		shorter := false
		for at := 0; at < len(s.steps) && tries > 0; tries-- {
			fewer := append(append([]int{}, s.steps[:at]...), s.steps[min(at+size, len(s.steps)):]...)
			if found := live(t, seed, fewer); found != nil {
				s, shorter = found, true
			} else {
				at += size
			}
		}
		if !shorter || size > len(s.steps) {
			size /= 2
		}
	}
	return s
}

// difference ends a history.
type difference string

// twin is one of the wallets.
type twin struct {
	*testing.T
	pool   *pgxpool.Pool
	clock  *pgtest.Clock
	ledger *budget.Ledger
	holds  *holds.Book
	carver *leases.Carver
	book   *wallet.Book

	no        int
	seqs      []int64 // of the draws
	names     map[int64]int
	schema    schema.Name
	cells     *twinCells        // or nil
	heard     []budget.Crossing // of the call that has not committed yet
	remembers []string          // the thresholds that its last entry has as reported
}

// twins is a history.
type twins struct {
	*testing.T
	r        *rand.Rand
	n        int
	all      [3]*twin
	now      time.Time
	cfg      wallet.Config
	told     []string
	lots     []*named       // all lots that a balance or an answer has shown
	rows     []*named       // those that the last balance showed
	last     wallet.Balance // of the first twin
	draws    []drawn
	holds    []held
	plans    []plan
	grants   []granted
	children []string
}

// named is a lot, by its number in each wallet, 0 where that is not known.
type named struct {
	nos       [3]int64
	reference string
	shown     time.Time
}

type plan struct {
	reference string
	at        time.Time
}

type granted struct {
	wallet.Grant
	at time.Time
}

type drawn struct {
	at     time.Time
	amount int64
}

type held struct {
	id     string
	at     time.Time
	amount int64
}

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

const retained = 60 * day // what a purge leaves

func newTwins(t *testing.T, seed uint64) *twins {
	r := rand.New(rand.NewPCG(seed, 1<<40))
	w := &twins{T: t, now: noon, cfg: wallet.Config{
		Overdraft:   []int64{0, 0, 20}[r.IntN(3)],
		Priorities:  map[string]int{"paid": 10, "promotional": 5},
		LateRefunds: []time.Duration{wallet.Lapse, wallet.Forever, 20 * time.Hour}[r.IntN(3)],
	}}
	if r.IntN(3) == 0 {
		w.now = time.Date(2028, 2, 25+r.IntN(5), 23, 0, 0, 0, time.UTC)
	}
	if r.IntN(2) == 0 {
		w.cfg.Thresholds = []budget.Threshold{{Name: "low", Left: 25 + w.cfg.Overdraft, Rearm: 1 + r.Int64N(10)}, {Name: "out", Rearm: 1}}
	}
	for i := range w.all {
		w.all[i] = w.twin(i)
	}
	if r.IntN(2) == 0 {
		w.settles(w.all[2])
	}
	return w
}

// twin is a twin in a database of its own, whose ledger adds up at the end, too.
func (w *twins) twin(no int) *twin {
	tw := &twin{T: w.T, pool: pgtest.Open(w.T), no: no, names: map[int64]int{}}
	tw.clock = pgtest.SetClock(w.T, tw.pool, w.now)
	w.inCell(tw, "metered")
	w.Cleanup(func() {
		r, err := tw.ledger.Verify(context.Background(), tw.pool, budget.VerifyOptions{})
		require.NoError(w, err)
		require.Empty(w, r.Differences)
	})
	return tw
}

func (tw *twin) sweeps() {
	tw.Helper()
	_, err := tw.holds.Sweep(tw.Context(), tw.pool, holds.SweepOptions{})
	require.NoError(tw, err)
	_, err = tw.book.Sweep(tw.Context(), tw.pool, wallet.SweepOptions{})
	require.NoError(tw, err)
}

// said is an answer, and the numbers of the lots in it.
type said struct {
	text string
	lots []int64
	refs []string
}

func say(answer any, lots ...int64) said {
	raw, err := json.Marshal(answer)
	if err != nil {
		panic(err)
	}
	return said{text: string(raw), lots: lots}
}

var refusals = []error{budget.ErrRefundExceeds, budget.ErrEntryPurged, holds.ErrState, holds.ErrExcess, holds.ErrNotReturnable, wallet.ErrConflict, wallet.ErrExpired, wallet.ErrUnknownLot}

// refused is the text of a refusal.
func refused(err error) string {
	if e := (*budget.ExceededError)(nil); errors.As(err, &e) {
		text := "refused:"
		for _, r := range e.Refusals {
			raw, _ := json.Marshal(r)
			text += fmt.Sprintf(" %s retry %v hold due %v", raw, r.RetryAfter, r.HoldDue)
		}
		return text
	}
	for _, known := range refusals {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	panic(difference(fmt.Sprint("unexpected: ", err)))
}

// ask asks each twin, and compares.
func (w *twins) ask(what string, call func(tw *twin) (said, error)) (ok bool) {
	var first said
	w.told = append(w.told, what)
	for i, tw := range w.all {
		a, err := call(tw)
		if err != nil {
			a = said{text: refused(err)}
		}
		if i == 0 {
			first, ok = a, err == nil
			w.told[len(w.told)-1] += ": " + a.text
		} else if a.text != first.text {
			from := 0
			for from < min(len(first.text), len(a.text)) && first.text[from] == a.text[from] {
				from++
			}
			from = max(0, from-200)
			panic(difference(fmt.Sprintf("%s:\nnever swept: …%s\n%s: …%s", what, first.text[from:], [...]string{"", "each hour", "at random"}[i], a.text[from:])))
		} else if len(a.lots) != len(first.lots) {
			panic(difference(fmt.Sprintf("%s: lots %v and %v", what, first.lots, a.lots)))
		}
		for j, no := range a.lots {
			if len(a.refs) > j && i == 0 {
				first.refs = a.refs
			}
			w.bind(what, first, j, i, no)
		}
	}
	return ok
}

// bind notes that a lot of the first twin has a number in another one.
func (w *twins) bind(what string, first said, j, i int, no int64) {
	if i == 0 || no == 0 {
		return
	}
	a, known := w.all[0].names[first.lots[j]]
	b, knownToo := w.all[i].names[no]
	switch {
	case first.lots[j] == 0:
	case known && knownToo && a != b:
		panic(difference(fmt.Sprintf("%s: lot %d of the first is %v, and lot %d of twin %d is %v", what, first.lots[j], w.lots[a], no, i, w.lots[b])))
	case known:
		w.all[i].names[no] = a
		w.lots[a].nos[i] = no
	case knownToo:
		w.all[0].names[first.lots[j]] = b
		w.lots[b].nos[0] = first.lots[j]
	default:
		w.all[0].names[first.lots[j]], w.all[i].names[no] = len(w.lots), len(w.lots)
		l := &named{shown: w.now}
		l.nos[0], l.nos[i] = first.lots[j], no
		w.lots = append(w.lots, l)
	}
}

// call is ask in a transaction, which a refusal may leave to be committed.
func (w *twins) call(what string, call func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error)) bool {
	keep := w.r.IntN(2) == 0
	return w.ask(what, func(tw *twin) (a said, err error) {
		var txErr error
		_ = sweep.Through(w.Context(), tw.pool, tw.schema, time.Minute, func() error { // as RunTx does
			tw.heard = nil
			txErr = pgx.BeginFunc(w.Context(), tw.pool, func(tx pgx.Tx) error {
				a, err = call(w.Context(), tx, tw)
				if keep && err != nil && tx.Conn().PgConn().TxStatus() == 'T' {
					return nil
				}
				return err
			})
			return cmp.Or(err, txErr)
		})
		if txErr == nil {
			w.heardIn(tw, what)
		}
		tw.heard = nil // a report that was rolled back is none
		if err == nil {
			err = txErr
		}
		return a, err
	})
}

// look compares balances, and what one more unit than there is is refused with.
func (w *twins) look() {
	w.rows = nil
	w.ask("balance", func(tw *twin) (a said, err error) {
		b, err := tw.book.Balance(w.Context(), tw.pool, "ann")
		if err != nil {
			return a, err
		}
		b.Seq = 0
		if tw.no == 0 {
			w.last = b
		}
		nos := make([]int64, len(b.Lots))
		for i := range b.Lots {
			nos[i] = b.Lots[i].Lot
			b.Lots[i].Lot = 0
			a.refs = append(a.refs, b.Lots[i].Reference)
		}
		b.Lots = append([]wallet.Lot(nil), b.Lots...)
		a.text, a.lots = say(b).text, nos
		if tw.no == 0 {
			for _, l := range w.last.Lots {
				w.rows = append(w.rows, &named{reference: l.Reference, shown: w.now})
			}
		}
		for i := range w.rows {
			w.rows[i].nos[tw.no] = nos[i]
		}
		return a, nil
	})
	for i := range w.plans { // a plan that has ended keeps its name as long as entries about it
		if slices.ContainsFunc(w.rows, func(l *named) bool { return strings.HasPrefix(l.reference, w.plans[i].reference) }) {
			w.plans[i].at = w.now
		}
	}
	for _, row := range w.rows {
		if i, ok := w.all[0].names[row.nos[0]]; ok {
			w.lots[i].shown, w.lots[i].reference = w.now, row.reference
			for t, no := range w.lots[i].nos {
				row.nos[t] = max(row.nos[t], no)
			}
		}
	}
	for _, use := range []string{"", "images"} {
		w.ask("check "+use, func(tw *twin) (said, error) {
			c := tw.book.Charge("ann", max(0, w.last.For(use)+w.cfg.Overdraft)+1)
			c.Note.Use = use
			_, err := tw.ledger.Check(w.Context(), tw.pool, c)
			return said{}, err
		})
	}
	w.ask("usage", func(tw *twin) (said, error) {
		u, err := tw.ledger.Usage(w.Context(), tw.pool, budget.Query{Scope: "ann", Window: 3 * time.Hour})
		if err != nil {
			return said{}, err
		}
		return say([]int64{u[0].Used, u[0].Held}), nil
	})
	w.told = w.told[:len(w.told)-4]
}

// end lets everything end, sweeps all, and compares what became of each lot and hold.
func (w *twins) end() {
	for _, tw := range w.all {
		for range 2 { // a part may be left
			tw.sweeps()
			w.heardIn(tw, "sweep")
		}
		r, err := tw.ledger.Verify(w.Context(), tw.pool, budget.VerifyOptions{})
		require.NoError(w, err)
		if len(r.Differences) > 0 {
			panic(difference(fmt.Sprintf("the books of twin %d: %v", tw.no, r.Differences)))
		}
	}
	w.look()
	w.ask("in the end", func(tw *twin) (a said, err error) {
		if tw.no == 2 { // a purge took some
			tw = w.all[0]
		}
		// Lots of plans that nobody used are one, where the wallet was idle for long, and units that went on many times did so
		// at once.
		rows, err := tw.pool.Query(w.Context(), tw.schema.SQL(`with lots as (
				select *, (plan).renewal is not null and drawn + held + revoked + pending + rest + kept = 0 as unused from metered.lots)
			select json_build_array(amount, rest, kept, drawn, held, lapsed, revoked, rolled, pending, origin, reference, category, expires_at, granted_at)::text
			from lots where not unused and not (origin = 'r' and rolled = amount)
			union all
			select json_build_array((plan).renewal, sum(amount) filter (where origin = 'g'), sum(lapsed))::text from lots where unused group by (plan).renewal
			order by 1`))
		if err != nil {
			return a, err
		}
		text, err := pgx.CollectRows(rows, pgx.RowTo[string])
		return said{text: strings.Join(text, "\n")}, err
	})
}

// sweepAt sweeps a twin at a time: all of it, or a part.
func (w *twins) sweepAt(tw *twin, at time.Time) {
	tw.clock.Set(at)
	tw.heard = nil
	if tw.no == 2 && w.once(3) {
		_, err := tw.book.Sweep(w.Context(), tw.pool, wallet.SweepOptions{Batch: 1 + w.r.IntN(3), Max: 1 + w.r.IntN(2)})
		require.NoError(w, err)
	} else {
		tw.sweeps()
	}
	w.heardIn(tw, "sweep")
}

// advance moves the clock on, and lets two of the twins be swept.
func (w *twins) advance(by time.Duration) {
	to := w.now.Add(by)
	w.told = append(w.told, "advance "+by.String()+" to "+to.Format(time.RFC3339Nano))
	every := max(time.Hour, by/24)
	for at := w.now.Truncate(time.Hour).Add(every); at.Before(to); at = at.Add(every) {
		w.sweepAt(w.all[1], at)
	}
	w.sweepAt(w.all[1], to)
	if w.r.IntN(3) == 0 {
		w.sweepAt(w.all[2], w.now.Add(time.Duration(w.r.Int64N(int64(by)+1))).Truncate(time.Microsecond))
	}
	w.all[2].clock.Set(to)
	if w.r.IntN(6) == 0 {
		w.purge(w.all[2])
	}
	if w.all[2].cells != nil && w.r.IntN(8) == 0 {
		w.told[len(w.told)-1] += ", move"
		w.move(w.all[2], 1-w.all[2].cells.at)
	}
	w.all[0].clock.Set(to)
	w.now = to
}

func (w *twins) purge(tw *twin) {
	w.told[len(w.told)-1] += ", purge"
	_, err := tw.ledger.Purge(w.Context(), tw.pool, budget.PurgeOptions{OlderThan: retained})
	require.NoError(w, err)
	_, err = purge.Holds.Delete(w.Context(), tw.pool, purge.Options{OlderThan: retained})
	require.NoError(w, err)
}
