package migrate

import (
	"context"
	"errors"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/schema"
)

// singly is a transaction that sends River's texts of several statements one by one, and ALTER
// TABLE with several actions once for each. Citus demands both.
type singly struct{ pgx.Tx }

func (s singly) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if len(args) > 0 {
		return s.Tx.Exec(ctx, sql, args...)
	}
	for _, statement := range schema.Statements(sql) {
		for _, text := range actions(statement) {
			if tag, err = s.Tx.Exec(ctx, text); err != nil {
				return tag, err
			}
		}
	}
	return tag, nil
}

var alterTable = regexp.MustCompile(`^((?:\s|--.*\n)*ALTER TABLE\s+\S+)\s`)

// actions splits an ALTER TABLE whose actions are on lines of their own.
func actions(statement string) []string {
	m := alterTable.FindStringSubmatch(statement)
	if m == nil {
		return []string{statement}
	}
	var all []string
	action := ""
	for line := range strings.Lines(statement[len(m[0]):]) {
		action += line
		if strings.HasSuffix(strings.TrimSpace(line), ",") && strings.Count(action, "(") == strings.Count(action, ")") {
			all, action = append(all, m[1]+" "+strings.TrimSuffix(strings.TrimSpace(action), ",")), ""
		}
	}
	return append(all, m[1]+" "+action)
}

const (
	hasCitusSQL = `select pg_catalog.to_regclass('pg_catalog.pg_dist_schema') is not null`

	undistributedSQL = `
select pg_catalog.format('%I.river_migration', n.nspname), pg_catalog.format('%I.river_job', n.nspname)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace join pg_catalog.pg_dist_schema s on s.schemaid = n.oid
where c.relname = 'river_migration' and n.nspname = coalesce(nullif($1::text, ''), pg_catalog.current_schema())
  and not exists (select from pg_catalog.pg_dist_partition p where p.logicalrelid::pg_catalog.oid = c.oid)`

	unloggedSQL = `
select pg_catalog.format('%I.%I', n.nspname, c.relname)
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace join pg_catalog.pg_dist_schema s on s.schemaid = n.oid
where pg_catalog.starts_with(c.relname::text, 'river') and c.relkind = 'r' and c.relpersistence = 'u' and n.nspname = coalesce(nullif($1::text, ''), pg_catalog.current_schema())`

	distributeSQL = `select pg_catalog.create_distributed_table($1::text::regclass, null, colocate_with => $2::text)`
	truncateSQL   = `select pg_catalog.truncate_local_data_after_distributing_table($1::text::regclass)`
)

// distribute makes River's tables whole parts of their schema's shard, where the schema is one.
// River makes that of its versions in a DO, where Citus does not see it, and that of its leader
// unlogged, which would keep the shard from being moved while it is written to.
func (m migration) distribute(ctx context.Context, tx pgx.Tx) error {
	var citus bool
	if err := answer.QueryRow(ctx, tx, hasCitusSQL).Scan(&citus); err != nil || !citus {
		return err
	}
	var versions, beside string
	err := answer.QueryRow(ctx, tx, undistributedSQL, m.opts.RiverSchema).Scan(&versions, &beside)
	if err == nil {
		if _, err = tx.Exec(ctx, distributeSQL, versions, beside); err == nil {
			_, err = tx.Exec(ctx, truncateSQL, versions)
		}
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	rows, err := answer.Query(ctx, tx, unloggedSQL, m.opts.RiverSchema)
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, table := range tables {
		if err == nil {
			_, err = tx.Exec(ctx, "alter table "+table+" set logged")
		}
	}
	return err
}
