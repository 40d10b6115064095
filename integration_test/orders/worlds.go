package orders

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// worlds keeps the rows with which the orders of some calls begin, to put them back before each
// order. They are made once for each set of needs. All rows of a database are those of one world.
type worlds struct {
	db     *pgxpool.Pool
	look   string     // reads now
	tables []string   // in the order in which they are filled
	now    []string   // a digest of the rows of each table when they were looked at, or nil
	last   *beginning // the one that was put back last
	kept   map[need]*beginning
	states *sync.Map // the text of each state that was read, by its rows and the time
}

// beginning is a world that is kept.
type beginning struct {
	*world
	no   int
	rows []string // as now
	at   time.Time
}

// keepSQL makes a copy of each table for the rows of all beginnings, and the functions that keep
// one and put it back. Entries come before the lines of jobs, which a trigger marks, and River's
// rows have times of its own: both are always put back.
const keepSQL = `
create schema worlds;
create table worlds.sequences (world int, name regclass, last bigint, called boolean);
create table worlds.tables as
    select row_number() over (order by c.relname <> 'ledger', c.relname)::int as nth, c.oid::regclass as name, w.copy,
        (select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as columns,
        case when c.relname in ('river_job', 'holds') then '(to_jsonb(t) - ''{created_at,scheduled_at,attempted_at,finalized_at,issued_at}''::text[])::text' else 't::text' end as row,
        c.relname in ('parked_scopes', 'river_job') as always
    from pg_class c, lateral (select format('worlds.%I', c.relname) as copy) w
    where c.relkind = 'r' and (c.relnamespace = 'metered'::regnamespace and c.relname <> 'schema_version' or c.relname in ('reports', 'fed', 'river_job'));
do $do$
declare
    t worlds.tables;
    s regclass;
    keep text := ''; clear text := ''; fill text := '';
begin
    for t in select * from worlds.tables order by nth loop
        execute format('create table %s as select 0 as world, t.* from %s t with no data; create index on %1$s (world)', t.copy, t.name);
        keep := keep || format('insert into %s select of_world, t.* from %s t; ', t.copy, t.name);
        clear := clear || format('if %s or %s = any(of_tables) then delete from %s; end if; ', t.always::text, t.nth, t.name);
        fill := fill || format('if %s or %s = any(of_tables) then insert into %s (%s) overriding system value select %4$s from %5$s where world = of_world; end if; ',
            t.always::text, t.nth, t.name, t.columns, t.copy);
    end loop;
    for s in select oid from pg_class where relkind = 'S' and (relnamespace = 'metered'::regnamespace or relname = 'river_job_id_seq') loop
        keep := keep || format('insert into worlds.sequences select of_world, %L, last_value, is_called from %s; ', s, s);
    end loop;
    execute format('create function worlds.keep(of_world int) returns void language plpgsql as $$ begin %s end $$', keep);
    execute format('create function worlds.restore(of_world int, of_tables int[]) returns void language plpgsql as $$ begin %s %s
        perform setval(name, last, called) from worlds.sequences where world = of_world; end $$', clear, fill);
end
$do$`

// lookSQL leaves out what is random or of another clock: the ids of sessions, of claims and of the
// holds of jobs.
const lookSQL = `
select string_agg(format('(select count(*) || '' '' || coalesce(sum(hashtextextended(regexp_replace(%s, ''(job/[0-9]+/|session_|claim_)[0-9A-Za-z_-]+'', ''\1'', ''g''), 0)), 0) from %s t)',
        row, name), ', ' order by nth),
	array_agg(name::text order by nth) from worlds.tables`

// clockSQL is the clock of pgtest as an expression, which Postgres inlines: a function is planned
// again in each statement.
const clockSQL = `create or replace function metered.clock() returns timestamptz language sql volatile
	as $$ select timestamptz 'epoch' + pg_catalog.pg_sequence_last_value('pgtest.clock') / 1000000 * interval '1 second'
		+ pg_catalog.pg_sequence_last_value('pgtest.clock') % 1000000 * interval '1 microsecond' $$`

// keepWorlds begins with an empty world, at the time of the clock.
func keepWorlds(ctx context.Context, db *pgxpool.Pool, at time.Time, states *sync.Map) (*worlds, error) {
	w := &worlds{db: db, kept: map[need]*beginning{}, states: states}
	if _, err := db.Exec(ctx, keepSQL); err != nil {
		return nil, err
	}
	if err := db.QueryRow(ctx, lookSQL).Scan(&w.look, &w.tables); err != nil {
		return nil, err
	}
	w.look = "select array[" + w.look + "]"
	return w, w.keep(ctx, nobody, &world{}, at)
}

// keep keeps the rows that are there, as the beginning for some needs.
func (w *worlds) keep(ctx context.Context, needs need, as *world, at time.Time) error {
	b := &beginning{world: as, no: len(w.kept), at: at}
	w.kept[needs] = b
	if _, err := w.db.Exec(ctx, "select worlds.keep($1)", b.no); err != nil {
		return err
	}
	rows, err := w.rows(ctx)
	b.rows = rows
	return err
}

// rows looks at the rows.
func (w *worlds) rows(ctx context.Context) (rows []string, err error) {
	err = w.db.QueryRow(ctx, w.look).Scan(&rows)
	w.now = rows
	return rows, err
}

// restore puts the rows of a beginning back, where they are others. The digests leave out random names, which the
// rows of two beginnings do not share: after another beginning it puts all rows back.
func (w *worlds) restore(ctx context.Context, b *beginning) error {
	var changed []int32
	for i := range w.tables {
		if w.now == nil || w.last != b || w.now[i] != b.rows[i] {
			changed = append(changed, int32(i+1))
		}
	}
	w.now, w.last = nil, b
	_, err := w.db.Exec(ctx, "select worlds.restore($1, $2)", b.no, changed)
	return err
}

// state reads the state of a world, and verifies it. What it read of the same rows at the same time
// it does not read again.
func (w *worlds) state(ctx context.Context, of *world, at time.Time) (string, error) {
	rows, err := w.rows(ctx)
	if err != nil {
		return "", err
	}
	key := fmt.Sprint(at.UnixMicro(), rows)
	if state, known := w.states.Load(key); known {
		return state.(string), nil
	}
	state, err := of.state(ctx, w.db)
	if err != nil {
		return "", err
	}
	report, err := of.ledger.Verify(ctx, w.db, budget.VerifyOptions{})
	if err != nil {
		return "", err
	}
	if len(report.Differences) > 0 {
		state += fmt.Sprintf(" and the ledger does not add up: %v", report.Differences)
	}
	w.states.Store(key, state)
	return state, nil
}
