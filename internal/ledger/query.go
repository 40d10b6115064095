package ledger

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Query asks for the most of a limit.
type Query struct {
	SQL    string
	Args   []any
	Set    func(most *int64, err error) error // nil without a row or for null
	Forget func()                             // leaves the limit out until it is Set
}

// Unchanged is a statement that fails unless the query answers most still: it divides by 0.
func (q *Query) Unchanged(most int64) (sql string, args []any) {
	return fmt.Sprintf(`select 1 operator(pg_catalog./) case when (%s
) operator(pg_catalog.=) $%d::pg_catalog.int8 then 1 else 0 end`,
		q.SQL, len(q.Args)+1), append(slices.Clone(q.Args), most)
}

// Locks reports whether the query locks rows. Then it may be asked under the scopes' locks alone: whoever
// changes such a row under them would wait for it, and it for them.
func (q *Query) Locks() bool { return rowLocks.MatchString(q.SQL) }

// LockAllSQL takes all locks of a call, or of a command, in one order.
const LockAllSQL = `
select metered.lock_all(case when $6::text[] operator(pg_catalog.=) '{}' then $1::bigint[] else metered.with_sums($1::bigint[], $6::text[]) end,
    $2::bigint[], $3::text[], $4::metered.hold_ids[], $5::int)`

// LockAllArgs are the arguments of LockAllSQL.
func LockAllArgs(waitMS int32, all ...Locks) []any {
	keys, idKeys, scopes, sums := []int64{}, []int64{}, []string{}, []string{} // not nil, which is sent as null
	var named []HoldIDs
	for _, l := range all {
		keys, idKeys, scopes = append(keys, l.Keys...), append(idKeys, l.IDKeys...), append(scopes, l.Scopes...)
		sums = append(sums, l.Sums...)
		if l.Holds != nil {
			named = append(named, *l.Holds)
		}
	}
	return []any{inOrder(keys), inOrder(idKeys), scopes, AllHoldIDs(named), waitMS, sums}
}

func inOrder(keys []int64) []int64 {
	slices.Sort(keys)
	return slices.Compact(keys)
}

// Ask takes locks, unless lockSQL is empty, and runs queries, in one flush. The queries see the
// commits that the locks waited for. failed maps the errors of the locks.
func Ask(ctx context.Context, tx Sender, lockSQL string, lockArgs []any, queries []*Query, failed func(error) error) error {
	batch := &pgx.Batch{}
	if lockSQL != "" {
		batch.Queue(lockSQL, lockArgs...)
	}
	QueueAll(batch, queries)
	results := answer.SendBatch(ctx, tx, batch)
	err := answers(results, lockSQL != "", queries, failed)
	if closing := results.Close(); err == nil && closing != nil {
		err = failed(closing)
	}
	return err
}

// Sender sends batches: a pool, a connection or a transaction.
type Sender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

func answers(results pgx.BatchResults, locking bool, queries []*Query, failed func(error) error) error {
	if locking {
		if _, err := results.Exec(); wrong(err) && !ours.MatchString(err.Error()) { // pgx prepares a batch before it sends it
			return unprepared(queries, err)
		} else if err != nil {
			return failed(err)
		}
	}
	return ReadAll(results, queries, failed)
}

func unprepared(queries []*Query, err error) error {
	if len(queries) > 1 {
		err = fmt.Errorf("or of another limit of the call: %w", err)
	}
	return queries[0].Set(nil, err)
}

// QueueAll queues queries, for ReadAll.
func QueueAll(batch *pgx.Batch, queries []*Query) {
	batch.Queue(`select pg_catalog.current_setting('transaction_isolation') like 'read %'`)
	for _, q := range queries {
		batch.Queue(q.SQL, q.Args...)
	}
}

// ReadAll reads the answers of queries.
func ReadAll(results pgx.BatchResults, queries []*Query, failed func(error) error) error {
	var fresh bool // each statement sees the latest commits
	if err := results.QueryRow().Scan(&fresh); wrong(err) && !ours.MatchString(err.Error()) {
		return unprepared(queries, err)
	} else if err != nil {
		return failed(err)
	}
	for _, q := range queries {
		rows, _ := results.Query() // its error is that of the rows, too
		if err := q.Read(rows, fresh || locking.MatchString(q.SQL), failed); err != nil {
			return err
		}
	}
	return nil
}

// Unprepared is the error of a query that pgx could not prepare with a batch, or nil if err is
// another one.
func Unprepared(queries []*Query, err error) error {
	var before pgx.ErrPreprocessingBatch
	if errors.As(err, &before) && wrong(err) {
		for _, q := range queries {
			if q.SQL == before.SQL() {
				return q.Set(nil, err)
			}
		}
	}
	return nil
}

// Read sets the limit to the one answer of the query. current is false if that may be from before
// the locks.
func (q *Query) Read(rows pgx.Rows, current bool, failed func(error) error) error {
	most, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[*int64])
	switch {
	case err != nil && !wrong(err):
		return failed(err)
	case errors.Is(err, pgx.ErrNoRows):
		err = nil
	case err == nil && !current:
		err = errNotLocking
	}
	return q.Set(most, err)
}

// wrong reports whether err is the fault of a query, and neither of the moment nor of the
// connection.
func wrong(err error) bool {
	return err != nil && !fault.Retryable(err) && !errors.Is(err, context.Canceled)
}

var (
	ours          = regexp.MustCompile(`\b(lock_all|hold_ids)\b|SQLSTATE (3F000|25)`) // the schema is missing, or the transaction failed
	locking       = regexp.MustCompile(`(?i)\bfor\s+(share|update|no\s+key\s+update)\b`)
	rowLocks      = regexp.MustCompile(`(?i)\bfor\s+(key\s+|no\s+key\s+)?(share|update)\b`)
	errNotLocking = errors.New("above READ COMMITTED it must end with FOR SHARE, or it answers from before the locks")
)
