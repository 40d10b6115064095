package cells_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// load is processes that work for a tenant, each with a Router of its own, so that most have an old idea of the tenant's cell.
type load struct {
	*world
	tokens                                              []string
	spent, held, direct, commands, used, minted, scopes atomic.Int64
	mu                                                  sync.Mutex
	done                                                map[string]metered.Outcome[int]
}

var mint = tokens.Mint{Purpose: "p", Subject: "acme", TTL: time.Hour}

// While a tenant moves, each charge, command, hold and token counts once, at each isolation level, and nothing is left behind. The short form often finds a
// move that waits for no transaction (lockTenantSQL without its lock). TestMove_SessionsUnderLoadAreExact always does.
func TestMove_UnderLoadIsExact(t *testing.T) {
	t.Parallel()
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, pools...)
			l := &load{world: w, done: map[string]metered.Outcome[int]{}}
			in(t, w.router(), "acme", func(c *metered.Client, tx pgx.Tx) error {
				for range pgtest.Size(20, 60) {
					m, err := c.Tokens.Mint(t.Context(), tx, mint)
					if err != nil {
						return err
					}
					l.tokens = append(l.tokens, m.Token.Reveal())
				}
				_, err := c.Budget.Credit(t.Context(), tx, budget.Credit{Scope: "acme/hot", Amount: 1})
				return err
			})
			var working sync.WaitGroup
			acts := make(chan bool)
			for i := range pgtest.Size(3, 6) {
				working.Go(func() {
					r := w.router()
					for n := range pgtest.Sizes(12, 20, 400) {
						if err := l.act(r, i, n); err != nil {
							t.Errorf("%d %d: %v", i, n, err)
						}
						acts <- true
					}
				})
			}
			go func() { working.Wait(); close(acts) }()
			mover, moves := w.router(), 0
			var moving sync.WaitGroup // a move goes on beside the next acts
			for n := 0; ; n++ {
				if _, more := <-acts; !more {
					break
				}
				if n%pgtest.Size(6, 8) == 0 {
					moving.Wait()
					moves++
					moving.Go(func() { w.move(mover, "acme", moves%3) })
				}
			}
			moving.Wait()
			t.Logf("%d moves, %d commands, %d other charges, %d tokens used and %d minted", moves, l.commands.Load(), l.direct.Load(), l.used.Load(), l.minted.Load())
			require.Greater(t, moves, pgtest.Size(5, 20))
			at := w.lives("acme")
			w.verified()
			sum := func(sql string) int64 {
				return pgtest.Value[int64](t, w.pools[at], fmt.Sprintf(sql, w.schemas[at]))
			}
			last := `(select distinct on (scope) * from %s.ledger where scope like 'acme%%' order by scope, seq desc) l`
			tallied := sum(`select coalesce(sum(amount), 0)::bigint from %s.tallies where scope like 'acme%%'`) // charges that wait for the chain's next entry
			require.Equal(t, l.spent.Load(), tallied+sum(`select coalesce(sum(spent), 0)::bigint from `+last))
			require.Equal(t, l.held.Load(), sum(`select coalesce(sum(held), 0)::bigint from `+last))
			require.Equal(t, l.commands.Load(), sum(`select count(*) from %s.operations`))
			require.Equal(t, l.commands.Load(), sum(`select count(*) from %s.uploads`))
			require.Equal(t, int64(len(l.tokens))+l.minted.Load(), sum(`select count(*) from %s.tokens`))
			require.Equal(t, l.used.Load(), sum(`select coalesce(sum(used), 0)::bigint from %s.tokens`))
			for id, first := range l.done {
				out, err := do(t.Context(), mover, command(id), func(context.Context, *metered.Tx) (int, error) { panic("it ran") })
				require.NoError(t, err)
				require.True(t, out.Replayed)
				require.Equal(t, first.Result, out.Result)
				require.Equal(t, first.Receipt.Entries[0].Seq, out.Receipt.Entries[0].Seq)
			}
		})
	}
}

func command(id string) metered.Command {
	return metered.Command{ID: id, Tenant: "acme", Input: id, Charges: []budget.Charge{{Scope: "acme/hot", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1 << 40)}}}}
}

// act does one thing for the tenant.
func (l *load) act(r *cells.Router, worker, n int) error {
	level := pgtest.IsolationLevels[pgtest.Random(l.TB).IntN(3)]
	ctx := context.Background()
	run := func(fn func(ctx context.Context, c *metered.Client, tx pgx.Tx) error) error {
		for {
			err := patiently(ctx, r, "acme", func(ctx context.Context, c *metered.Client) error {
				return c.RunTx(ctx, pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
					if _, err := c.Tokens.Mint(ctx, tx, mint); err != nil { // no lock of a scope protects it
						return err
					}
					return fn(ctx, c, tx)
				})
			})
			if err == nil {
				l.minted.Add(1)
			}
			if !errors.Is(err, budget.ErrSerialization) {
				return err
			}
		}
	}
	switch pgtest.Random(l.TB).IntN(7) {
	case 0, 1: // a command, or one that was carried out
		id := fmt.Sprint(worker, "/", n)
		l.mu.Lock()
		for old := range l.done {
			if pgtest.Random(l.TB).IntN(2) == 0 {
				id = old
			}
			break
		}
		_, again := l.done[id]
		l.mu.Unlock()
		cmd := command(id)
		cmd.Isolation = level
		for {
			out, err := do(ctx, r, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) {
				var schema string
				if err := tx.QueryRow(ctx, `select relnamespace::regnamespace::text from pg_locks l join pg_class c on c.oid = l.relation
					where l.pid = pg_backend_pid() and c.relname = 'operations' limit 1`).Scan(&schema); err != nil {
					return 0, err
				}
				_, err := tx.Exec(ctx, `insert into `+schema+`.uploads (tenant, name) values ('acme', $1)`, id)
				return pgtest.Random(l.TB).Int(), err
			})
			switch {
			case errors.Is(err, budget.ErrSerialization):
				continue
			case err != nil:
				return err
			case out.Replayed != again:
				return fmt.Errorf("%s: replayed is %v", id, out.Replayed)
			case !again:
				l.commands.Add(1)
				l.spent.Add(1)
				l.mu.Lock()
				l.done[id] = out
				l.mu.Unlock()
			}
			return nil
		}
	case 2: // a charge, sometimes of a new scope
		scope := []string{"acme/hot", "acme", fmt.Sprint("acme/new/", l.scopes.Add(1))}[pgtest.Random(l.TB).IntN(3)]
		err := run(func(ctx context.Context, c *metered.Client, tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 2})
			return err
		})
		if err == nil {
			l.spent.Add(2)
			l.direct.Add(1)
		}
		return err
	case 3: // a charge of a transaction that has not entered the tenant, at a place that may be old
		scope := []string{"acme/hot", fmt.Sprint("acme/new/", l.scopes.Add(1))}[pgtest.Random(l.TB).IntN(2)]
		for {
			c, err := r.Client("acme")
			if err != nil {
				return err
			}
			err = pgx.BeginTxFunc(ctx, cells.PoolOf(c), pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 3})
				return err
			})
			switch {
			case errors.Is(err, cells.ErrMoved):
				return nil
			case metered.Retryable(err):
				continue
			case err == nil:
				l.spent.Add(3)
				l.direct.Add(1)
			}
			return err
		}
	case 4: // a hold that stays, or is captured
		captured := pgtest.Random(l.TB).IntN(2) == 0
		err := run(func(ctx context.Context, c *metered.Client, tx pgx.Tx) error {
			h, err := c.Holds.Place(ctx, tx, holds.Placement{Tenant: "acme", TTL: time.Hour, Lines: []holds.Line{{Scope: "acme/hot", Amount: 5}}})
			if err == nil && captured {
				_, err = c.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{h.ID}, All: true})
			}
			return err
		})
		if err == nil && captured {
			l.spent.Add(5)
		} else if err == nil {
			l.held.Add(5)
		}
		return err
	case 5:
		err := run(func(ctx context.Context, c *metered.Client, tx pgx.Tx) error {
			_, err := c.Tokens.Consume(ctx, tx, "p", "acme", l.tokens[pgtest.Random(l.TB).IntN(len(l.tokens))])
			return err
		})
		if errors.Is(err, tokens.ErrInvalid) {
			return nil // it was used
		}
		if err == nil {
			l.used.Add(1)
		}
		return err
	}
	return run(func(ctx context.Context, c *metered.Client, tx pgx.Tx) error { // a read is of the place where the tenant lives
		u, err := c.Budget.Usage(ctx, tx, budget.Query{Scope: "acme/hot"})
		if err == nil && u[0].Credited != 1 {
			err = fmt.Errorf("it read %v", u[0])
		}
		return err
	})
}
