package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// asks are the queries of the limits of an attempt. A transaction of the engine's own asks before
// it has the scopes: else all callers of a hot one would wait for its way to the program and back.
// It asks once more in the flush that takes the locks and commits, which fails where an answer has
// changed. A query that was answered alike twice is asked there alone.
//
// The locks are first if a query locks rows, in a transaction of a caller's, which keeps them in any
// case, and in the attempt after one whose answers have changed.
type asks struct {
	e       *Engine
	op      *Operation
	queries []*ledger.Query
	most    []int64  // their answers so far
	known   bool     // they are those of before
	sent    []string // the statements that ask once more
}

// asks returns nil without queries.
func (e *Engine) asks(t transaction, op *Operation, queries []*ledger.Query) (*asks, error) {
	if len(queries) == 0 {
		return nil, nil
	}
	a := &asks{e: e, op: op, queries: queries}
	if _, own := t.(*owned); !own || slices.ContainsFunc(queries, (*ledger.Query).Locks) {
		op.Locking = true
	}
	if op.Locking || op.Asking || op.Isolation != pgx.ReadCommitted {
		return a, nil
	}
	for _, q := range queries {
		most, ok := e.answers.sure(q)
		if !ok {
			return a, nil
		}
		a.most = append(a.most, most)
	}
	for i, q := range queries {
		if err := q.Set(&a.most[i], nil); err != nil {
			return nil, err
		}
	}
	a.known = true
	return a, nil
}

// noting are the queries, which note their answers.
func (a *asks) noting() []*ledger.Query {
	if a.op.Locking {
		return a.queries
	}
	noting := make([]*ledger.Query, len(a.queries))
	for i, q := range a.queries {
		asked := *q
		asked.Set = func(most *int64, err error) error {
			if most != nil {
				a.most = append(a.most, *most)
				a.e.answers.note(q, *most)
			}
			return q.Set(most, err)
		}
		noting[i] = &asked
	}
	return noting
}

// again queues the locks, and the queries once more, unless the locks came first.
func (a *asks) again(f *flush, lockArgs []any) {
	if a.op.Locking {
		return
	}
	f.exec(a.e.sql.lockAll, lockArgs...)
	for i, q := range a.queries {
		sql, args := q.Unchanged(a.most[i])
		a.sent = append(a.sent, sql)
		f.queue(reading{of: a.asked}, sql, args)
	}
}

// asked is the error of a query of again.
func (a *asks) asked(err error) error { return &askedAhead{err, a} }

// failed is the error of the flush of again: of a query, if pgx could not prepare that. Errors of
// other statements, such as the caller's, are as they are.
func (a *asks) failed(err error) error {
	var before pgx.ErrPreprocessingBatch
	if a != nil && errors.As(err, &before) && slices.Contains(a.sent, before.SQL()) {
		return a.asked(err)
	}
	return err
}

// askedAhead is the error of a query that was asked before its locks, and once more under them.
type askedAhead struct {
	error
	asks *asks
}

func (a *askedAhead) Unwrap() error { return a.error }

// changed reports whether err may be that of an answer that has changed, or of a query that cannot
// be a part of another one. The next attempt then asks anew, and the one after it under the locks.
func (op *Operation) changed(err error) bool {
	var asked *askedAhead
	state := sqlstate.Of(err)
	if op.Locking || !errors.As(err, &asked) || !strings.HasPrefix(state, "21") && !strings.HasPrefix(state, "22") && !strings.HasPrefix(state, "42") {
		return false
	}
	if op.Asking, op.Locking = true, !asked.asks.known; asked.asks.known {
		asked.asks.e.answers.forget(asked.asks.queries)
	}
	return true
}

// maxAnswers bounds the answers that an engine remembers.
const maxAnswers = 10_000

// answers are the last answers of queries of limits, which are looked at under the locks before
// they count.
type answers struct {
	mu sync.Mutex
	of map[string]answered
}

type answered struct {
	most int64
	sure bool // it was the same twice
}

func keyOf(q *ledger.Query) string { return fmt.Sprintf("%s\x00%v", q.SQL, q.Args) }

func (a *answers) sure(q *ledger.Query) (int64, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last := a.of[keyOf(q)]
	return last.most, last.sure
}

func (a *answers) note(q *ledger.Query, most int64) {
	key := keyOf(q)
	a.mu.Lock()
	defer a.mu.Unlock()
	last, known := a.of[key]
	if !known && len(a.of) >= maxAnswers {
		for other := range a.of { // any one
			delete(a.of, other)
			break
		}
	}
	if a.of == nil {
		a.of = map[string]answered{}
	}
	a.of[key] = answered{most, known && last.most == most}
}

func (a *answers) forget(queries []*ledger.Query) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, q := range queries {
		delete(a.of, keyOf(q))
	}
}

// lockThem are the arguments of the locks of an operation and then of its step.
func lockThem(wait int32, op *Operation, locks ledger.Locks) []any {
	args := ledger.LockAllArgs(wait, locks)
	if keys, ok := args[0].([]int64); ok {
		args[0] = append([]int64{op.Key}, keys...) // taken in this order
	}
	return args
}

// ask asks the queries in a flush of its own, under the locks if these come first.
func (a *asks) ask(ctx context.Context, t transaction, lockArgs []any, doing string) error {
	lock := ""
	if a.op.Locking {
		lock = a.e.sql.lockAll
	}
	return ledger.Ask(ctx, t.tx(), lock, lockArgs, a.noting(), func(err error) error { return failed(doing, err) })
}
