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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// attempted is a command that was called once, with Do's answer.
type attempted struct {
	id, scope, token string
	amount           int64
	err              error
}

// Commands of all kinds run while backends are killed at random and the server crashes. Do's answer about each is
// true.
func TestSoak_EveryAnswerIsTrue(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	const workers = 8
	crashes, each := pgtest.Size(1, 3), pgtest.Size(30, 150)
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	s := open(t, server.ConnString(), metered.Config{Config: budget.Config{LockTimeout: 2 * time.Second}, MaxAttempts: 50})
	var texts []string
	for range workers {
		texts = append(texts, s.mint(each)...)
	}

	// Faults are paced by attempts that ended, so that a slow machine has as many attempts between two faults as a fast one.
	var ended atomic.Int64
	stop := make(chan struct{})
	until := func(n int64) bool {
		for ended.Load() < n {
			select {
			case <-stop:
				return false
			case <-time.After(time.Millisecond):
			}
		}
		return true
	}
	var chaos sync.WaitGroup
	chaos.Go(func() { killBackends(t, server, until) })
	chaos.Go(func() {
		for n := range crashes {
			if !until(int64((n + 1) * workers * each / (crashes + 1))) {
				return
			}
			if err := server.Kill(); err != nil {
				t.Error(err)
			}
			if err := server.Restart(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	all := make([][]attempted, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				a := s.attempt(w, i, texts[w*each+i])
				all[w] = append(all[w], a)
				ended.Add(1)
				var away *pgconn.ConnectError
				for errors.As(a.err, &away) && s.pool.Ping(t.Context()) != nil && t.Context().Err() == nil && !t.Failed() {
					time.Sleep(10 * time.Millisecond) // the server restarts: not all attempts are to meet that
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	chaos.Wait()
	s.pool.Reset() // the pool may still have connections of the backends that were ended last
	s.judge(all)
}

// killBackends ends a random backend that is in a transaction, once in a few attempts.
func killBackends(t *testing.T, server *pgserver.Server, until func(ended int64) bool) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.Background())
		}
	}()
	for n := int64(0); until(n); n += 1 + pgtest.Random(t).Int64N(6) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		if conn == nil || conn.IsClosed() {
			conn, _ = pgx.Connect(ctx, server.ConnString())
		}
		if conn != nil {
			_, err := conn.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity
				where datname like 'metered_integration%' and xact_start is not null order by random() limit 1`)
			if err != nil {
				_ = conn.Close(ctx)
			}
		}
		cancel()
	}
}

// attempt calls one command, with one of several things wrong with it.
func (s *system) attempt(worker, i int, token string) attempted {
	a := attempted{id: fmt.Sprintf("%d/%d", worker, i), scope: fmt.Sprint("org/", i%5), token: token, amount: 1 + pgtest.Random(s.t).Int64N(100)}
	cmd, fn := upload(a.id, a.scope, token, a.amount)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	switch i % 8 {
	case 0: // gives up while it runs
		time.AfterFunc(time.Duration(pgtest.Random(s.t).Int64N(int64(8*time.Millisecond))), cancel)
	case 1:
		inner := fn
		fn = func(ctx context.Context, tx *metered.Tx) (int64, error) {
			if _, err := inner(ctx, tx); err != nil {
				return 0, err
			}
			return 0, errors.New("the function says no")
		}
	case 2:
		cmd.Isolation = pgx.RepeatableRead
	case 3:
		cmd.Isolation = pgx.Serializable
	case 5, 6:
		cmd.EarlyRelease = true
	}
	if i%8 == 4 { // in a transaction of the caller's, who has to explain its COMMIT
		a.err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			_, err := metered.DoTx(ctx, s.c, tx, cmd, fn)
			return err
		})
		if a.err != nil {
			a.err = errors.Join(a.err, metered.ErrIndefinite)
		}
		return a
	}
	_, a.err = metered.Do(ctx, s.c, cmd, fn)
	return a
}

// judge compares Do's answers with the rows.
func (s *system) judge(all [][]attempted) {
	t := s.t
	ctx := t.Context()
	s.verify()
	var committed, failed, unknown int
	for _, attempts := range all {
		for _, a := range attempts {
			var n int
			require.NoError(t, s.pool.QueryRow(ctx, `select count(*) from uploads where id = $1 and amount = $2`, a.id, a.amount).Scan(&n))
			switch {
			case a.err == nil:
				committed++
				require.Equal(t, 1, n, "%s was acknowledged and is not there", a.id)
			case errors.Is(a.err, metered.ErrIndefinite):
				unknown++
				cmd, fn := upload(a.id, a.scope, a.token, a.amount)
				out, err := metered.Do(ctx, s.c, cmd, fn)
				require.NoError(t, err, "%s after %v", a.id, a.err)
				require.Equal(t, n == 1, out.Replayed, "%s after %v", a.id, a.err)
				require.Equal(t, a.amount, out.Result)
			default:
				failed++
				require.Zero(t, n, "%s was not committed (%v) and is there", a.id, a.err)
			}
		}
	}
	t.Logf("%d committed, %d failed, %d unknown and then committed", committed, failed, unknown)
	require.NotZero(t, committed)
	require.NotZero(t, failed)
	require.NotZero(t, unknown)
	require.Equal(t, committed+unknown, s.verify())
}
