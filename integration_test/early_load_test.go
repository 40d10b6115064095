package integration_test

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
	"github.com/pgmetered/metered/internal/pgtest"
)

// chained is a table each row of which names one that its writer had seen.
const chained = `create table links (n bigserial primary key, id text unique not null, after text)`

const linkSQL = `insert into links (id, after) select $1, (select l.id from links l order by l.n desc limit 1)`

// earlyLoad has the answers to the commands of a round, by their ids.
type earlyLoad struct {
	*system
	round int
	mixed bool // not early commands only
	stop  atomic.Bool

	mu       sync.Mutex
	answered map[string][]error // one for each call
	acked    int
	replays  int
}

// openChained opens a database for earlyLoads.
func openChained(t *testing.T, connString string) *system {
	s := open(t, connString, metered.Config{ResolveTimeout: 300 * time.Millisecond})
	_, err := s.pool.Exec(t.Context(), chained)
	require.NoError(t, err)
	return s
}

// on is the same system on another server that has its database.
func (s *system) on(t *testing.T, connString string) *system {
	t.Helper()
	config, err := pgxpool.ParseConfig(connString)
	require.NoError(t, err)
	config.ConnConfig.Database = s.pool.Config().ConnConfig.Database
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	return &system{t, pool, c}
}

// run calls commands from many sides, each twice at once, until the server is gone
// or stop is set.
func (l *earlyLoad) run() {
	const workers = 6 // with two connections each
	var wg sync.WaitGroup
	for w := range workers {
		for range 2 {
			wg.Go(func() {
				// Without a deadline, which would be for how long an outcome is looked up.
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				defer time.AfterFunc(time.Minute, cancel).Stop()
				for i := 0; !l.stop.Load(); i++ {
					if l.call(ctx, fmt.Sprintf("%d/%d/%d", l.round, w, i), i) != nil {
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

// call makes a command: early, plain, or a charge without an operation.
func (l *earlyLoad) call(ctx context.Context, id string, i int) error {
	charge := budget.Charge{
		Scope: "all", Amount: 1, Limits: []budget.Limit{{Max: 1 << 40, Window: time.Hour}}, Note: budget.Note{Reason: id},
	}
	var out metered.Outcome[string]
	var err error
	if l.mixed && i%8 == 7 {
		id += fmt.Sprintf("/%p", &out) // either of the two callers makes its own
		charge.Note.Reason = id
		err = pgx.BeginFunc(ctx, l.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, linkSQL, id); err != nil {
				return err
			}
			_, err := l.c.Budget.Charge(ctx, tx, charge)
			return err
		})
		if err != nil {
			err = errors.Join(err, metered.ErrIndefinite)
		}
	} else {
		out, err = metered.Do(ctx, l.c, metered.Command{ID: id, EarlyRelease: !l.mixed || i%8 != 6, Charges: []budget.Charge{charge}},
			func(ctx context.Context, tx *metered.Tx) (string, error) {
				_, err := tx.Exec(ctx, linkSQL, id)
				return id, err
			})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered[id] = append(l.answered[id], err)
	if err == nil {
		l.acked++
	}
	if out.Replayed {
		l.replays++
	}
	return err
}

// waitForAnswers returns once n commands were acknowledged.
func (l *earlyLoad) waitForAnswers(n int) {
	pgtest.WaitFor(l.t, "the load to get going", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.acked >= n
	})
}

// judge compares the answers with the rows in s, which may be another server than the one that answered.
func (l *earlyLoad) judge(s *system) (lost []string, unknown int) {
	t, ctx := l.t, l.t.Context()
	rows, err := s.pool.Query(ctx, `select id from links where id like $1`, fmt.Sprintf("%d/%%", l.round))
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	there := map[string]bool{}
	for _, id := range ids {
		there[id] = true
		require.Contains(t, l.answered, id)
	}
	for id, errs := range l.answered {
		for _, err := range errs {
			switch {
			case err == nil && !there[id]:
				lost = append(lost, id)
			case errors.Is(err, metered.ErrIndefinite):
				unknown++
			case err != nil && len(errs) == 1:
				require.False(t, there[id], "%s was not committed (%v) and is there", id, err)
			}
		}
	}
	return lost, unknown
}

// whole checks that the rows agree: the ledger's chain, each entry with its row and its operation, and each row with
// the one that its writer had seen.
func (s *system) whole() {
	t, ctx := s.t, s.t.Context()
	report, err := s.c.Budget.Verify(ctx, s.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	for what, sql := range map[string]string{
		"rows of writers that had seen a lost row": `select count(*) from links l
			where l.after is not null and not exists (select from links p where p.id = l.after)`,
		"rows without an entry": `select count(*) from links l
			where 1 <> (select count(*) from metered.ledger e where e.note->>'reason' = l.id)`,
		"entries without a row": `select count(*) from metered.ledger e
			where not exists (select from links l where l.id = e.note->>'reason')`,
		"operations without their entry": `select count(*) from metered.operations o
			where not exists (select from metered.ledger e where e.operation = o.id and array[e.seq] = o.seqs)`,
		"entries without their operation": `select count(*) from metered.ledger e
			where e.operation is not null and not exists (select from metered.operations o where o.id = e.operation)`,
		"a chain that does not begin at 1": `select coalesce(max(seq), 0) - count(*) from metered.ledger`,
		"spending that is not the sum":     `select coalesce(max(spent), 0) - coalesce(sum(amount), 0) from metered.ledger`,
	} {
		var n int64
		require.NoError(t, s.pool.QueryRow(ctx, sql).Scan(&n), what)
		require.Zero(t, n, what)
	}
}
