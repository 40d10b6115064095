package answer

import (
	"cmp"
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PinSQL gives answers in text their usual forms, until the transaction ends.
const PinSQL = `select pg_catalog.set_config('DateStyle', 'ISO', true), pg_catalog.set_config('IntervalStyle', 'postgres', true),
	pg_catalog.set_config('bytea_output', 'hex', true), pg_catalog.set_config('array_nulls', 'on', true)`

// pinSQL sets two styles in the transaction. The server reports both, so that a caller's can be set
// again without being asked for. The other settings do not matter: see plain.
const pinSQL = `select pg_catalog.set_config('DateStyle', $1::text, true), pg_catalog.set_config('IntervalStyle', $2::text, true)`

// Textual reports whether the connections of a pool get answers in text, as PgBouncer may want it.
// Their forms depend on settings of the server, which a transaction of the library's own pins.
// Without a pool nothing is committed.
func Textual(pool *pgxpool.Pool) bool {
	return pool != nil && isText(pool.Config().ConnConfig.DefaultQueryExecMode)
}

func isText(mode pgx.QueryExecMode) bool {
	return mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol
}

// customKey is the key of a connection's data: its configuration is a copy each time.
const customKey = "github.com/pgmetered/metered: answers in text"

// textual reports whether a connection gets answers in text.
func textual(conn *pgx.Conn) bool {
	data := conn.PgConn().CustomData()
	is, known := data[customKey].(bool)
	if !known {
		is = isText(conn.Config().DefaultQueryExecMode)
		data[customKey] = is
	}
	return is
}

// styles are the DateStyle and the IntervalStyle of a session.
type styles struct{ date, interval string }

// stylesOf are those that a session has, and usual whether pgx reads the answers that it gives.
func stylesOf(conn *pgconn.PgConn) (s styles, usual bool) {
	s = styles{conn.ParameterStatus("DateStyle"), conn.ParameterStatus("IntervalStyle")}
	s.date, s.interval = cmp.Or(s.date, "ISO"), cmp.Or(s.interval, "postgres") // a proxy may report neither
	return s, strings.HasPrefix(s.date, "ISO") && s.interval == "postgres"
}

func (s styles) args() []any { return []any{s.date, s.interval} }

// pinned is a batch that has its answers in the usual styles, and leaves the caller's. Where it
// begins with a savepoint the styles are set in that, so that going back to it takes them back.
func pinned(batch *pgx.Batch, s styles) (with *pgx.Batch, before int) {
	if strings.HasPrefix(batch.QueuedQueries[0].SQL, "savepoint ") {
		before = 1
	}
	usual := styles{"ISO", "postgres"}
	with = &pgx.Batch{QueuedQueries: append([]*pgx.QueuedQuery{}, batch.QueuedQueries[:before]...)}
	with.Queue(pinSQL, usual.args()...)
	with.QueuedQueries = append(with.QueuedQueries, batch.QueuedQueries[before:]...)
	with.Queue(pinSQL, s.args()...)
	return with, before
}

// results are the answers of a batch, without that of its first statement of pinned.
type results struct {
	pgx.BatchResults
	before int // answers until that one, negative after it
}

func (r *results) next() pgx.BatchResults {
	if r.before == 0 {
		_, _ = r.BatchResults.Exec() // its error is that of the next statement, too
	}
	r.before--
	return r.BatchResults
}

func (r *results) Exec() (pgconn.CommandTag, error) { return r.next().Exec() }

func (r *results) Query() (pgx.Rows, error) { return ReadAll(r.next().Query()) }

func (r *results) QueryRow() pgx.Row { return RowOf(r.next().Query()) }

// sendAll sends a batch on a connection whose answers are text, or by a transaction on it.
func sendAll(ctx context.Context, conn *pgx.Conn, by sender, batch *pgx.Batch) pgx.BatchResults {
	s, usual := stylesOf(conn.PgConn())
	if usual || batch.Len() == 0 {
		return &results{by.SendBatch(ctx, batch), -1}
	}
	with, before := pinned(batch, s)
	return &results{by.SendBatch(ctx, with), before}
}

// send sends one statement, and reads its answer whole.
func send(ctx context.Context, conn *pgx.Conn, by sender, sql string, args []any) (pgx.Rows, error) {
	s, usual := stylesOf(conn.PgConn())
	if usual {
		return ReadAll(by.Query(ctx, sql, args...))
	}
	for len(args) > 0 {
		if _, mode := args[0].(pgx.QueryExecMode); !mode {
			break
		}
		args = args[1:]
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, args...)
	with, before := pinned(batch, s)
	r := &results{by.SendBatch(ctx, with), before}
	rows, err := r.Query()
	if closing := r.Close(); err == nil {
		err = closing
	}
	return rows, err
}
