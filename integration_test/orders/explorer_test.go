package orders

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/interleave"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// explorer is a database with gates, and sessions on it.
type explorer struct {
	pieces
	*interleave.Explorer
	clock   *pgtest.Clock
	clients []*metered.Client
	*worlds
}

func newExplorer(t *testing.T, sessions int) *explorer {
	t.Helper()
	return newExplorerOf(t, sessions, schema.Current().Source(), &sync.Map{})
}

// newExplorerOf is an explorer of another text of the schema. Explorers of the same text may share the states that they have read.
func newExplorerOf(t *testing.T, sessions int, source string, states *sync.Map) *explorer {
	t.Helper()
	ctx := t.Context()
	e := &explorer{}
	db := pgtest.OpenWith(t, pgtest.Options{Empty: true, Config: func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["jit"], c.ConnConfig.RuntimeParams["plan_cache_mode"] = "off", "force_generic_plan"
	}})
	gated := interleave.Gated(source, interleave.Shared(source, "metered"))
	require.Equal(t, source, interleave.Ungated(gated), "the schema is the same but for its gates")
	conn, err := pgx.ConnectConfig(ctx, db.Config().ConnConfig)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	require.NoError(t, interleave.Install(ctx, conn))
	_, err = conn.Exec(ctx, schema.Script(gated)+"create table reports (scope text not null); create table fed (scope text, seq bigint, primary key (scope, seq));", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	e.clock = pgtest.SetClock(t, db, pgtest.Tomorrow(12))
	_, err = db.Exec(ctx, clockSQL)
	require.NoError(t, err)
	e.pieces, err = makePieces(ctx, db)
	require.NoError(t, err)
	e.Explorer, err = interleave.New(ctx, db.Config(), sessions)
	require.NoError(t, err)
	t.Cleanup(func() { e.Close(context.Background()) })
	e.clients = make([]*metered.Client, sessions)
	require.NoError(t, e.Open(ctx))
	for i := range e.clients {
		require.NoError(t, e.newClient(ctx, i))
	}
	e.worlds, err = keepWorlds(ctx, db, e.clock.Now(), states)
	require.NoError(t, err)
	return e
}

// newClient makes the client of a session, and calls it once: its first call looks at the schema.
func (e *explorer) newClient(ctx context.Context, session int) error {
	c, err := metered.New(e.Pool(session), metered.Config{Config: budget.Config{LockTimeout: 30 * time.Minute}, MaxAttempts: 1})
	if err != nil {
		return err
	}
	e.clients[session] = c
	_, err = metered.Do(ctx, c, metered.Command{ID: fmt.Sprint("warm", session)}, func(context.Context, *metered.Tx) (int, error) { return 0, nil })
	return err
}

// setup puts the rows of a world in place, and makes the calls on it.
func (e *explorer) setup(ctx context.Context, all []call, at []pgx.TxIsoLevel) (*world, []interleave.Call, error) {
	var needs need
	for _, c := range all {
		needs |= c.needs
	}
	if e.kept[needs] == nil {
		if err := e.begin(ctx, needs); err != nil {
			return nil, nil, err
		}
	}
	b := e.kept[needs]
	if err := e.restore(ctx, b); err != nil {
		return nil, nil, err
	}
	if !e.clock.Now().Equal(b.at) {
		e.clock.Set(b.at)
	}
	for i, c := range all {
		if c.remembers {
			if err := errors.Join(e.Open(ctx), e.newClient(ctx, i)); err != nil {
				return nil, nil, err
			}
		}
	}
	w := b.world
	if slices.ContainsFunc(all, func(c call) bool { return c.session }) {
		w = w.clone()
		if err := e.openSessions(ctx, w, all); err != nil {
			return nil, nil, err
		}
	}
	if needs&jumped != 0 {
		e.clock.Advance(-30 * time.Minute)
	}
	var steps []interleave.Call
	for i, c := range all {
		steps = append(steps, func(ctx context.Context, pool *pgxpool.Pool) error {
			if c.own != nil {
				return c.own(ctx, e.clients[i], pool, w, at[i])
			}
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: at[i]}, func(tx pgx.Tx) error { return c.tx(ctx, tx, w) })
		})
	}
	return w, steps, nil
}

// begin makes the world that some calls need.
func (e *explorer) begin(ctx context.Context, needs need) error {
	empty := e.kept[nobody]
	if err := e.restore(ctx, empty); err != nil {
		return err
	}
	e.clock.Set(empty.at)
	w, err := e.build(ctx, e.db, "w", needs, e.clock.Advance)
	if err != nil {
		return err
	}
	if needs&jumped != 0 {
		w.model.ahead = true
		w.model.jobs = slices.DeleteFunc(w.model.jobs, func(j job) bool {
			rests := j.choices[0].line == ""
			if rests {
				w.model.later++
			}
			return rests
		})
	}
	return e.keep(ctx, needs, w, e.clock.Now())
}

// openSessions opens a session for each call that wants one. They are closed as those of a process that dies, before they are renewed.
func (e *explorer) openSessions(ctx context.Context, w *world, all []call) error {
	if err := e.Open(ctx); err != nil {
		return err
	}
	for i, c := range all {
		if c.session {
			if err := w.open(ctx, e.clients[i], fmt.Sprint("session", i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// judge compares an order that was run with the serial orders of the calls that took effect.
func (e *explorer) judge(ctx context.Context, w *world, all []call, r *interleave.Run) error {
	state, err := e.state(ctx, w, e.clock.Now())
	if err != nil {
		return err
	}
	for _, s := range w.sessions {
		s.Close()
	}
	said := make([]string, len(all))
	var took []int
	for i, err := range r.Errs {
		if said[i] = answer(err); said[i] != again {
			took = append(took, i)
		}
	}
	var tried []string
	for order := range permutations(took) {
		m := w.model.clone()
		same := true
		for _, i := range order {
			same = all[i].model(m) == said[i] && same
		}
		if same && m.text() == state {
			return nil
		}
		tried = append(tried, fmt.Sprintf("%v would be %s", order, m.text()))
	}
	return fmt.Errorf("the answers %q and the state\n%s\nare of no serial order:\n%s", said, state, strings.Join(tried, "\n"))
}

func permutations(of []int) func(func([]int) bool) {
	return func(yield func([]int) bool) {
		var walk func(done, left []int) bool
		walk = func(done, left []int) bool {
			if len(left) == 0 {
				return yield(done)
			}
			for i, n := range left {
				rest := append(slices.Clone(left[:i]), left[i+1:]...)
				if !walk(append(slices.Clone(done), n), rest) {
					return false
				}
			}
			return true
		}
		walk(nil, of)
	}
}
