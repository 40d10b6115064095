package ledger

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PinSQL gives answers in text their usual forms, until the transaction ends.
const PinSQL = `select pg_catalog.set_config('DateStyle', 'ISO', true), pg_catalog.set_config('IntervalStyle', 'postgres', true),
	pg_catalog.set_config('bytea_output', 'hex', true), pg_catalog.set_config('array_nulls', 'on', true)`

// Textual reports whether the connections of a pool get answers in text, as PgBouncer may want it.
// Their forms depend on settings of the server, which a transaction of the library's own pins.
// Without a pool nothing is committed.
func Textual(pool *pgxpool.Pool) bool {
	if pool == nil {
		return false
	}
	mode := pool.Config().ConnConfig.DefaultQueryExecMode
	return mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol
}
