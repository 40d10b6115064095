package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

const stressOverdraft = 10

// stress is a wallet that many use at once, and the sums of the answers that they got.
type stress struct {
	*testing.T
	c      *metered.Client
	book   *wallet.Book
	clock  *pgtest.Clock
	name   string
	levels []pgx.TxIsoLevel
	serial atomic.Int64

	granted, drawn, captured, refunded, revoked atomic.Int64
	mu                                          sync.Mutex
	draws                                       []wasDrawn
	refs                                        []string
}

var anyLevel = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// Many grant, draw, reserve, capture, refund, revoke and roll over at once, at each isolation level and at all of them
// in one wallet, while the clock goes on, sweepers and purges run, and backends are killed. Afterwards each wallet has
// exactly the sum of its users' answers, and each lapse was announced once.
func TestWallets_UnderStressAllSumsAreExact(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	owner := pgtest.Open(t)
	clock := pgtest.SetClock(t, owner, pgtest.Tomorrow(9))
	pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) { c.MaxConns = 14 })
	c := pgtest.NewClient(t, pool, metered.Config{Holds: holds.Config{MaxTTL: time.Hour}, MaxAttempts: 100, Config: budget.Config{LockTimeout: time.Minute}, ResolveTimeout: 5 * time.Minute})
	_, err := owner.Exec(t.Context(), `create table told (wallet text, units bigint)`)
	require.NoError(t, err)
	tell := func(ctx context.Context, tx pgx.Tx, b wallet.Breakage) error {
		_, err := tx.Exec(ctx, `insert into told values ($1, $2)`, b.Wallet, b.Amount)
		return err
	}
	book, err := wallet.New(c.Budget, wallet.Config{Overdraft: stressOverdraft, LateRefunds: time.Minute, Subscribers: []wallet.Subscriber{tell}})
	require.NoError(t, err)

	var all []*stress
	for i, level := range anyLevel {
		all = append(all, &stress{T: t, c: c, book: book, clock: clock, name: fmt.Sprint("w", i), levels: []pgx.TxIsoLevel{level}})
	}
	all = append(all, &stress{T: t, c: c, book: book, clock: clock, name: "w mixed", levels: anyLevel})

	over, beside := make(chan struct{}), sync.WaitGroup{}
	until := func(every time.Duration, f func(ctx context.Context)) {
		beside.Go(func() {
			for {
				select {
				case <-over:
					return
				case <-time.After(every):
					f(context.Background())
				}
			}
		})
	}
	until(3*time.Millisecond, func(context.Context) { clock.Advance(200 * time.Millisecond) })
	var swept, purged, killed atomic.Int64
	until(5*time.Millisecond, func(ctx context.Context) { // a killed backend does not finish
		r, _ := book.Sweep(ctx, pool, wallet.SweepOptions{Batch: 3})
		swept.Add(int64(r.Ended))
		_, _ = c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	})
	until(20*time.Millisecond, func(ctx context.Context) {
		r, _ := c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: 20 * time.Second})
		purged.Add(r.Entries)
	})
	var ended atomic.Int64
	last := int64(0)
	until(60*time.Millisecond, func(ctx context.Context) {
		before := last
		if last = ended.Load(); last == before {
			return // on a busy machine no call would ever end
		}
		var n int64
		require.NoError(t, owner.QueryRow(ctx, `
			select count(pg_terminate_backend(pid)) from (
			    select pid from pg_stat_activity
			    where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle' and query !~ 'pgtest' and backend_type = 'client backend'
			    order by random() limit 1) p`).Scan(&n))
		killed.Add(n)
	})

	var workers sync.WaitGroup
	for _, s := range all {
		s.grant()
		for _, work := range []func(){s.grant, s.draw, s.draw, s.reserve, s.reserve, s.refund, s.revoke, s.rollOver} {
			workers.Go(func() {
				for range 6 {
					work()
					ended.Add(1)
				}
			})
		}
	}
	workers.Wait()
	close(over)
	beside.Wait()
	t.Logf("%d lots swept, %d entries purged, %d backends killed", swept.Load(), purged.Load(), killed.Load())
	require.Positive(t, killed.Load())

	clock.Advance(2 * time.Hour)
	_, err = c.Holds.Sweep(t.Context(), owner, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = book.Sweep(t.Context(), owner, wallet.SweepOptions{})
	require.NoError(t, err)
	for _, s := range all {
		s.verify(owner)
	}
}

// doUntilKnown runs a command until its outcome is known.
func doUntilKnown[R any](s *stress, cmd metered.Command, fn metered.Func[R]) (metered.Outcome[R], error) {
	cmd.ID, cmd.Input = fmt.Sprint(s.name, "/", s.serial.Add(1)), 1
	for {
		cmd.Isolation = s.levels[pgtest.Random(s.T).IntN(len(s.levels))]
		out, err := metered.Do(context.Background(), s.c, cmd, fn)
		if err == nil || metered.Code(err) != "" && !metered.Retryable(err) {
			return out, err
		}
	}
}

// expect fails the test at an answer that is none of these.
func (s *stress) expect(err error, answers ...error) bool {
	if err == nil {
		return true
	}
	for _, a := range answers {
		if errors.Is(err, a) {
			return false
		}
	}
	s.Errorf("%s: %v", s.name, err)
	return false
}

func (s *stress) grant() {
	g := wallet.Grant{Wallet: s.name, Amount: 20 + pgtest.Random(s.T).Int64N(40), Priority: new(int), Reference: fmt.Sprint("r", s.serial.Add(1))}
	*g.Priority = pgtest.Random(s.T).IntN(3)
	if pgtest.Random(s.T).IntN(4) > 0 {
		g.Ends = wallet.After(time.Duration(1+pgtest.Random(s.T).IntN(20)) * time.Second)
		g.Roll = &wallet.Roll{Cap: 5, Lasts: wallet.For(5 * time.Second)}
	}
	for range 2 { // the second time it is there
		out, err := doUntilKnown(s, metered.Command{}, func(ctx context.Context, tx *metered.Tx) (wallet.Granted, error) { return s.book.Grant(ctx, tx, g) })
		if s.expect(err) && !out.Result.Replayed {
			s.granted.Add(g.Amount)
			s.mu.Lock()
			s.refs = append(s.refs, g.Reference)
			s.mu.Unlock()
		}
	}
}

func (s *stress) draw() {
	d := toDraw{Wallet: s.name, Amount: 1 + pgtest.Random(s.T).Int64N(12), UpTo: pgtest.Random(s.T).IntN(2) == 0}
	out, err := doUntilKnown(s, metered.Command{}, func(_ context.Context, tx *metered.Tx) (int, error) { return 0, tx.Charge(d.of(s.book)) })
	if s.expect(err, budget.ErrExceeded) {
		s.drawn.Add(out.Receipt.Entries[0].Amount)
		s.mu.Lock()
		s.draws = append(s.draws, drawnBy(out.Receipt.Entries[0]))
		s.mu.Unlock()
	}
}

func (s *stress) reserve() {
	id := fmt.Sprint(s.name, "/h", s.serial.Add(1))
	hold := holds.Placement{ID: id, Lines: []holds.Line{s.book.Line(s.name, 1+pgtest.Random(s.T).Int64N(15))}, TTL: time.Duration(1+pgtest.Random(s.T).IntN(8)) * time.Second}
	_, err := doUntilKnown[int](s, metered.Command{Holds: []holds.Placement{hold}}, nil)
	if !s.expect(err, budget.ErrExceeded) || pgtest.Random(s.T).IntN(5) == 0 {
		return // the sweeper's
	}
	time.Sleep(time.Duration(pgtest.Random(s.T).IntN(10)) * time.Millisecond) // the work, during which others draw and sweep
	used := pgtest.Random(s.T).Int64N(hold.Lines[0].Amount + 1)
	_, err = doUntilKnown(s, metered.Command{}, func(_ context.Context, tx *metered.Tx) (int, error) {
		if used == 0 {
			return 0, tx.Release(holds.Release{IDs: []string{id}})
		}
		return 0, tx.Capture(holds.Capture{IDs: []string{id}, Lines: []holds.Line{s.book.Line(s.name, used)}})
	})
	if s.expect(err, holds.ErrState) {
		s.captured.Add(used)
	}
}

func (s *stress) refund() {
	s.draw() // so that there is one, mostly
	s.mu.Lock()
	if len(s.draws) == 0 {
		s.mu.Unlock()
		return
	}
	d := s.draws[pgtest.Random(s.T).IntN(len(s.draws))]
	s.mu.Unlock()
	r := budget.Refund{Scope: s.name, Seq: d.Seq, Amount: 1 + pgtest.Random(s.T).Int64N(d.Amount)}
	_, err := doUntilKnown(s, metered.Command{}, func(_ context.Context, tx *metered.Tx) (int, error) { return 0, tx.Refund(r) })
	if s.expect(err, budget.ErrRefundExceeds, budget.ErrEntryPurged) {
		s.refunded.Add(r.Amount)
	}
}

func (s *stress) ref() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refs[pgtest.Random(s.T).IntN(len(s.refs))]
}

func (s *stress) revoke() {
	r := wallet.Revoke{Wallet: s.name, Reference: s.ref(), Amount: 1 + pgtest.Random(s.T).Int64N(6)}
	out, err := doUntilKnown(s, metered.Command{}, func(ctx context.Context, tx *metered.Tx) (wallet.Revoked, error) { return s.book.Revoke(ctx, tx, r) })
	if s.expect(err, wallet.ErrUnknownLot) { // a purge took it
		s.revoked.Add(out.Result.Amount)
		require.Equal(s, r.Amount, out.Result.Amount+out.Result.Missing)
	}
}

func (s *stress) rollOver() {
	r := wallet.Rollover{Wallet: s.name, Reference: s.ref(), Cap: 7, For: 10 * time.Second}
	_, err := doUntilKnown(s, metered.Command{}, func(ctx context.Context, tx *metered.Tx) (wallet.Granted, error) { return s.book.Rollover(ctx, tx, r) })
	s.expect(err, wallet.ErrUnknownLot)
}

// verify compares a wallet with the sum of its users' answers. Nothing is held, and all lots that end have ended.
func (s *stress) verify(db *pgxpool.Pool) {
	s.Helper()
	report, err := s.c.Budget.Verify(s.Context(), db, budget.VerifyOptions{Scope: s.name})
	require.NoError(s, err)
	require.Empty(s, report.Differences, s.name)
	b, err := s.book.Balance(s.Context(), db, s.name)
	require.NoError(s, err)
	u, err := s.c.Budget.Usage(s.Context(), db, budget.Query{Scope: s.name})
	require.NoError(s, err)
	require.Zero(s, b.Held, s.name)
	require.Equal(s, s.drawn.Load()+s.captured.Load(), u[0].Spent, s.name)
	require.Equal(s, s.refunded.Load(), u[0].Refunded, s.name)
	require.Equal(s, u[0].Credited-u[0].Spent+u[0].Refunded, b.Units, s.name)
	value := func(sql string) int64 { return pgtest.Value[int64](s, db, sql, s.name) }
	require.Equal(s, s.granted.Load()-s.revoked.Load()-value(`select coalesce(sum(units), 0)::bigint from told where wallet = $1`), u[0].Credited, s.name)
	require.Zero(s, value(`select count(*) from metered.lot_holds where scope = $1`), s.name)
	require.GreaterOrEqual(s, value(`select min(credited - spent + refunded - held) from metered.ledger where scope = $1`), int64(-stressOverdraft), s.name)
	require.Zero(s, value(`select count(*) from metered.lots where scope = $1 and amount <> rest + drawn + held + lapsed + revoked + rolled
		or least(rest, drawn, held, lapsed, revoked, rolled) < 0`), s.name)
	require.Zero(s, value(`select count(*) from metered.lot_moves m join metered.ledger e using (scope, seq) join metered.lots l on l.no = m.lot
		where m.scope = $1 and m.kind in ('t', 'p', 'h', 'q') and e.at >= l.expires_at`), "%s: drawn after the end", s.name)
	require.Equal(s, max(0, b.Units), value(`select coalesce(sum(rest), 0)::bigint from metered.lots where scope = $1`), s.name)
}
