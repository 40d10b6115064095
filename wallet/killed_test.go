package wallet_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
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

const killedChild = "METERED_WALLET_CHILD" // a connection string makes the test binary a process that is killed

// killable is a client and its book, in a process that may be killed. Its told gets breakages and crossings.
type killable struct {
	client *metered.Client
	book   *wallet.Book
}

func newKillable(t *testing.T, pool *pgxpool.Pool, told func(wallet string)) *killable {
	c, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: 2 * time.Minute, OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		told(c.Scope)
		return nil
	}}})
	require.NoError(t, err)
	cfg := low(5)
	cfg.Subscribers = []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told(b.Wallet)
		return nil
	}}
	book, err := wallet.New(c.Budget, cfg)
	require.NoError(t, err)
	return &killable{client: c, book: book}
}

// killedActs are done to a wallet that has 30 units, and 15 of a lot that is due, of which 5 go on. left is the units
// after it.
var killedActs = []struct {
	name string
	do   func(ctx context.Context, k *killable, tx pgx.Tx, w string) error
	left int64
}{
	{"grant", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.book.Grant(ctx, tx, wallet.Grant{Wallet: w, Amount: 7, Reference: "c"})
		return err
	}, 42},
	{"draw", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.book.Draw(ctx, tx, wallet.Draw{Wallet: w, Amount: 12})
		return err
	}, 23},
	{"refund", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.client.Budget.Refund(ctx, tx, budget.Refund{Scope: w, Seq: 3, Amount: 4})
		return err
	}, 39},
	{"revoke", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.book.Revoke(ctx, tx, wallet.Revoke{Wallet: w, Reference: "b", Amount: 10})
		return err
	}, 25},
	{"roll over", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.book.Rollover(ctx, tx, wallet.Rollover{Wallet: w, Reference: "b", Cap: 9, For: day})
		return err
	}, 35},
	{"expire", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.book.Expire(ctx, tx, w)
		return err
	}, 35},
	{"reserve", func(ctx context.Context, k *killable, tx pgx.Tx, w string) error {
		_, err := k.client.Holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{k.book.Line(w, 11)}})
		return err
	}, 24},
}

// It is the child of TestWallet_OfAProcessThatIsKilled: it does everything, commits nothing, and waits.
func TestWallet_Child(t *testing.T) {
	conn := os.Getenv(killedChild)
	if conn == "" {
		t.Skip("is run by another test")
	}
	ctx := t.Context()
	cfg, err := pgxpool.ParseConfig(conn)
	require.NoError(t, err)
	cfg.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	quiet := newKillable(t, pool, func(string) {})
	for _, act := range killedActs {
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, act.do(ctx, quiet, tx, act.name))
		fmt.Println("did", act.name)
	}
	told := make(chan string)
	waits := newKillable(t, pool, func(w string) {
		told <- w
		<-ctx.Done()
	})
	go func() { _, _ = metered.Do[int](ctx, waits.client, crossingCommand(waits), nil) }()
	fmt.Println("told", <-told)
	go func() { _, _ = waits.book.Sweep(ctx, pool, wallet.SweepOptions{}) }()
	fmt.Println("told", <-told)
	<-ctx.Done()
}

// crossingCommand crosses a threshold, which is reported before it commits.
func crossingCommand(k *killable) metered.Command {
	return metered.Command{ID: "op", Charges: []budget.Charge{k.book.Charge("command", 33)}}
}

// A process is killed between its writes to wallets and its commit. Each wallet then stands as before, to the last row,
// and another process does the same acts, once.
func TestWallet_OfAProcessThatIsKilled(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	wallets := []string{"command", "sweep"}
	for _, act := range killedActs {
		wallets = append(wallets, act.name)
	}
	for _, w := range wallets {
		f.grant(wallet.Grant{Wallet: w, Amount: 20, Reference: "a", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day)}, LateRefunds: wallet.Late(day)})
		f.grant(wallet.Grant{Wallet: w, Amount: 30, Reference: "b"})
		_, err := f.tryDraw(wallet.Draw{Wallet: w, Amount: 5})
		require.NoError(t, err)
	}
	f.clock.Set(noon.Add(time.Hour))
	before := f.rows()

	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWallet_Child$")
	child.Env, child.Stderr = append(os.Environ(), killedChild+"="+pgtest.ConnString(f.pool)), os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	lines := bufio.NewScanner(out)
	for range wallets {
		require.True(t, lines.Scan())
		require.Regexp(t, "^(did|told) ", lines.Text())
	}
	require.NoError(t, child.Process.Kill())
	_ = child.Wait()

	told := map[string]int{}
	k := newKillable(t, f.pool, func(w string) { told[w]++ })
	for _, act := range killedActs {
		// The backend is terminated before its commit: nothing was done. Its lock is that of the killed one.
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, act.do(t.Context(), k, tx, act.name))
		_, err = f.pool.Exec(t.Context(), "select pg_terminate_backend($1)", tx.Conn().PgConn().PID())
		require.NoError(t, err)
		require.Error(t, tx.Commit(t.Context()))
	}
	clear(told)
	require.Equal(t, before, f.rows())
	f.verify()
	for _, act := range killedActs {
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error { return act.do(t.Context(), k, tx, act.name) }))
	}
	_, err = metered.Do[int](t.Context(), k.client, crossingCommand(k), nil)
	require.NoError(t, err)
	pgtest.WaitSettled(t, f.pool) // a sweep passes over a wallet that a killed backend still has
	_, err = k.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	for _, act := range killedActs {
		f.stands(act.name, act.left)
	}
	f.stands("command", 2)
	f.stands("sweep", 35)
	want := map[string]int{"command": 2} // the threshold and the breakage
	for _, w := range wallets[1:] {
		want[w] = 1
	}
	require.Equal(t, want, told)
}

// rows are all of the ledger and of lots.
func (f *fixture) rows() (all []string) {
	f.Helper()
	for _, table := range []string{"ledger", "lots", "lot_moves", "lot_holds", "holds", "hold_lines", "operations", "refund_sum"} {
		rows, err := f.pool.Query(f.Context(), "select to_jsonb(x)::text from metered."+table+" x order by 1")
		require.NoError(f, err)
		some, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(f, err)
		all = append(all, some...)
	}
	return all
}

// stands asserts the units of a wallet by Balance, by its lots, and by the last line of its Statement.
func (f *fixture) stands(w string, units int64) {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, w)
	require.NoError(f, err)
	require.Equal(f, units, b.Units, w)
	var lots int64
	for _, l := range b.Lots {
		lots += l.Units
	}
	require.Equal(f, units, lots, w)
	for l, err := range f.book.Statement(f.Context(), f.pool, w, budget.EntriesOptions{NewestFirst: true, Max: 1}) {
		require.NoError(f, err)
		require.Equal(f, units, l.Balance, w)
	}
}
