package commit_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// set is a client whose connections are cut, and the database beside it.
type set struct {
	*testing.T
	owner, pool *pgxpool.Pool
	c           *metered.Client
}

// kind is a public call that commits.
type kind struct {
	// call makes the call for an id. ready prepares its data, on connections that are not cut.
	ready func(s *set, id string) (call func(ctx context.Context) error)
	once  bool // the same call again does nothing more
	// effects counts the call's effects in the database, as SQL of the id $1. Defaults to the rows that the function
	// writes.
	effects string
	cfg     metered.Config
	refusal bool // that is on record is the effect, and no error
}

const (
	rows    = "select count(*) from uploads where name = $1"
	charges = "select count(*) from metered.ledger where scope = $1 and kind = 'c'"
	ended   = "select count(*) from metered.holds h where position($1 || '/' in h.holder) = 1 and state = "
)

func insert(ctx context.Context, tx pgx.Tx, id string) error {
	_, err := tx.Exec(ctx, "insert into uploads values ($1)", id)
	return err
}

// does is a kind that runs a command which writes a row, and charges.
func does(change func(s *set, id string, cmd *metered.Command), more func(s *set, tx *metered.Tx, id string) error) kind {
	return kind{once: true, ready: func(s *set, id string) func(context.Context) error {
		cmd := metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: id, Amount: 1}}}
		if change != nil {
			change(s, id, &cmd)
		}
		return func(ctx context.Context) error {
			_, err := metered.Do(ctx, s.c, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) {
				if more != nil {
					if err := more(s, tx, id); err != nil {
						return 0, err
					}
				}
				return 1, insert(ctx, tx, id)
			})
			return err
		}
	}}
}

func (k kind) with(change func(*kind)) kind { change(&k); return k }

func reservation(id string) metered.Reservation {
	return metered.Reservation{ID: id, Holder: id + "/", Lines: []holds.Line{{Scope: id + " tokens", Amount: 10}}, Charges: []budget.Charge{{Scope: id, Amount: 1}}}
}

func opened(s *set, id string) *metered.Session[int] {
	session, err := metered.Open[int](s.Context(), s.c, reservation(id))
	require.NoError(s, err)
	s.Cleanup(session.Close)
	return session
}

func batcher(s *set) *budget.Batcher {
	b, err := budget.NewBatcher(s.pool, s.c.Budget, budget.BatcherConfig{Timeout: 30 * time.Second})
	require.NoError(s, err)
	return b
}

var kinds = map[string]kind{
	"Do":               does(nil, nil),
	"Do, EarlyRelease": does(func(_ *set, _ string, cmd *metered.Command) { cmd.EarlyRelease = true }, nil),
	"Do, LSN, SERIALIZABLE": does(func(_ *set, _ string, cmd *metered.Command) {
		cmd.LSN, cmd.Isolation = true, pgx.Serializable
	}, nil),
	"Do, Token": does(func(s *set, id string, cmd *metered.Command) {
		var token tokens.Minted
		require.NoError(s, pgx.BeginFunc(s.Context(), s.owner, func(tx pgx.Tx) (err error) {
			token, err = s.c.Tokens.Mint(s.Context(), tx, tokens.Mint{Purpose: "p", Subject: id, TTL: time.Hour})
			return err
		}))
		cmd.Token = &metered.Redeem{Purpose: "p", Subject: id, Presented: token.Token.Reveal()}
	}, nil),
	"Do, Sticky": does(func(_ *set, id string, cmd *metered.Command) {
		cmd.Sticky = []budget.Charge{{Scope: id + " tries", Amount: 1}}
	}, nil),
	"Do, with a subscriber": does(func(_ *set, id string, cmd *metered.Command) {
		cmd.Holds = []holds.Placement{{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: id + " seats", Amount: 1}}}}
	}, nil).with(func(k *kind) {
		k.cfg.Holds.Subscribers = []holds.Subscriber{func(ctx context.Context, tx pgx.Tx, t holds.Transition) error {
			return insert(ctx, tx, "heard of "+t.Hold.ID)
		}}
	}),
	"Do, with a draw": does(nil, func(s *set, tx *metered.Tx, id string) error {
		book, err := wallet.New(s.c.Budget, wallet.Config{Overdraft: 100})
		if err != nil {
			return err
		}
		return tx.Charge(book.Charge(id+" wallet", 1))
	}),
	"Do, RecordRefusal": does(func(_ *set, _ string, cmd *metered.Command) {
		cmd.RecordRefusal, cmd.Charges[0].Limits = true, []budget.Limit{budget.Lifetime(0)}
	}, nil).with(func(k *kind) {
		k.refusal, k.effects = true, "select count(*) from metered.operations where id = $1 and refusal is not null"
	}),
	"DoTx in RunTx": {once: true, ready: func(s *set, id string) func(context.Context) error {
		return func(ctx context.Context) error {
			return s.c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := metered.DoTx(ctx, s.c, tx, metered.Command{ID: id}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, insert(ctx, tx, id) })
				return err
			})
		}
	}},
	"RunTx": {effects: charges, ready: func(s *set, id string) func(context.Context) error {
		return func(ctx context.Context) error {
			return s.c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := s.c.Budget.Charge(ctx, tx, budget.Charge{Scope: id, Amount: 1})
				return err
			})
		}
	}},
	"sqlmetered": {once: true, ready: func(s *set, id string) func(context.Context) error {
		db := stdlib.OpenDBFromPool(s.pool)
		s.Cleanup(func() { _ = db.Close() })
		return func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			_, err = sqlmetered.DoTx(ctx, s.c, tx, metered.Command{ID: id}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, insert(ctx, tx, id) })
			if err != nil {
				return err
			}
			return sqlmetered.Commit(tx)
		}
	}},
	"ChargeNow": {effects: charges, ready: func(s *set, id string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := s.c.Budget.ChargeNow(ctx, s.pool, budget.Charge{Scope: id, Amount: 1})
			return err
		}
	}},
	"Batcher.Charge": {effects: charges, ready: func(s *set, id string) func(context.Context) error {
		b := batcher(s)
		return func(ctx context.Context) error {
			_, err := b.Charge(ctx, budget.Charge{Scope: id, Amount: 1})
			return err
		}
	}},
	"Batcher.Ingest": {once: true, effects: charges, ready: func(s *set, id string) func(context.Context) error {
		b := batcher(s)
		return func(ctx context.Context) error {
			_, err := b.Ingest(ctx, budget.UsageEvent{ID: id, Charge: budget.Charge{Scope: id, Amount: 1}})
			return err
		}
	}},
	"Open": {effects: ended + "'h'", ready: func(s *set, id string) func(context.Context) error {
		return func(ctx context.Context) error {
			session, err := metered.Open[int](ctx, s.c, reservation(id))
			if err == nil {
				session.Close()
			}
			return err
		}
	}},
	"Settle": {once: true, ready: func(s *set, id string) func(context.Context) error {
		session := opened(s, id)
		return func(ctx context.Context) error {
			_, err := session.Settle(ctx, metered.Cost{All: true}, func(ctx context.Context, tx *metered.Tx) (int, error) { return 1, insert(ctx, tx, id) })
			return err
		}
	}},
	"Cancel": {once: true, effects: ended + "'r'", ready: func(s *set, id string) func(context.Context) error {
		session := opened(s, id)
		return func(ctx context.Context) error { return session.Cancel(ctx, "enough") }
	}},
}

// Each public call that commits has its connection cut at each message that either side sends. Postgres can be
// reached again at once, or not until the caller gives up. The answer agrees with the database: nil has one effect,
// an error none, and only an error that says so leaves it open.
func TestCalls_CutAtEachMessageNeverContradictTheDatabase(t *testing.T) {
	t.Parallel()
	var trials atomic.Int64
	t.Cleanup(func() { t.Logf("%d trials", trials.Load()) })
	for name, k := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			owner, _ := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
			pool, cutter := pgtest.Cut(t, owner)
			cfg := k.cfg
			cfg.ResolveTimeout = 5 * time.Second
			s := &set{T: t, owner: owner, pool: pool, c: pgtest.NewClient(t, pool, cfg)}
			if k.effects == "" {
				k.effects = rows
			}
			cutter.Arm(0, nil)
			require.NoError(t, k.answer(k.ready(s, "whole")(t.Context())))
			step, last, n := pgtest.Sizes(80, 15, 1), cutter.Count()-pgtest.Size(10, 0), 0
			for _, away := range []bool{false, true} {
				for at, struck := 1, true; struck; n++ {
					trials.Add(1)
					struck = k.trial(s, cutter, fmt.Sprint("id ", n), at, away)
					if at++; at < last { // COMMIT and its answer are cut at each message
						at = min(at+step-1, last)
					}
				}
			}
		})
	}
}

// answer is err, or nil where that is the answer that the call comes to if nothing is cut.
func (k kind) answer(err error) error {
	if k.refusal && errors.Is(err, budget.ErrExceeded) {
		return nil
	}
	return err
}

// trial cuts one call, and compares its answer with the database. It reports whether the call got that far.
func (k kind) trial(s *set, cutter *pgtest.Cutter, id string, at int, away bool) (struck bool) {
	what := fmt.Sprintf("cut at message %d, away %v", at, away)
	call := k.ready(s, id)
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	var cut atomic.Bool
	cutter.Arm(at, func() {
		if cut.Store(true); away {
			cutter.Refuse(true)
			time.AfterFunc(20*time.Millisecond, cancel)
		}
	})
	answer := call(ctx)
	cutter.Arm(0, nil)
	cutter.Refuse(false)
	pgtest.WaitSettled(s, s.owner)
	effects := func() int { return pgtest.Value[int](s, s.owner, k.effects, id) }
	unknown := errors.Is(answer, metered.ErrIndefinite) || errors.Is(answer, budget.ErrCommitUnknown)
	switch {
	case unknown:
		require.LessOrEqual(s, effects(), 1, "%s: %v", what, answer)
	case k.answer(answer) == nil:
		require.Equal(s, 1, effects(), "%s: %v", what, answer)
	default: // a hold that Open placed for a caller that left is released in the background
		pgtest.WaitFor(s, fmt.Sprintf("%s: no effect of what was answered by %v", what, answer), func() bool { return effects() == 0 })
	}
	if k.once {
		require.NoError(s, k.answer(call(s.Context())), "%s, again", what)
		require.Equal(s, 1, effects(), "%s, again", what)
	}
	return cut.Load()
}
