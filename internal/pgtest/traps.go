package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SetTraps creates a schema, traps, with operators that fit arguments of the library's better than those of pg_catalog
// do. All of them raise.
func SetTraps(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), trapsSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("pgtest: setting traps: %v", err)
	}
}

const trapsSQL = `
create schema traps;
create function traps.format(text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, regprocedure) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, text, int, text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';
do $$
declare
    a   record;
    b   record;
    op  text;
    fn  text;
begin
    set local client_min_messages = error;
    create temp table of_traps on commit drop as
    select distinct t.oid, format_type(t.oid, null) as name, coalesce(nullif(t.typbasetype, 0), t.oid) as base
    from pg_type t
    where t.oid in ('oid'::regtype, 'regclass'::regtype, 'regnamespace'::regtype, 'name'::regtype, 'int2'::regtype, 'int4'::regtype, 'numeric'::regtype, 'float8'::regtype,
        'pg_lsn'::regtype, 'tid'::regtype, 'float4'::regtype, 'xid'::regtype, 'regrole'::regtype)
       or t.oid in (select atttypid from pg_attribute x join pg_class c on c.oid = x.attrelid
                    where c.relnamespace = to_regnamespace('metered') and c.relkind in ('r', 'v') and x.attnum > 0 and not x.attisdropped);
    for a in select * from of_traps loop
        for b in select * from of_traps loop
            fn := format('traps.%I', 'trap_' || a.oid || '_' || b.oid);
            execute format('create function %s(%s, %s) returns bool language plpgsql as ''begin raise exception ''''trap''''; end''', fn, a.name, b.name);
            for op in
                select distinct o.oprname from pg_operator o
                where o.oprname in ('=', '<>', '<', '<=', '>', '>=', '+', '-', '*', '/', '%', '&', '<<', '>>', '||', '->', '->>', '@>', '~', '~~')
                and o.oprnamespace = 'pg_catalog'::regnamespace
                and (a.base = o.oprleft or exists (select from pg_cast c where c.castsource = a.base and c.casttarget = o.oprleft and c.castcontext = 'i') or o.oprleft = 'anyarray'::regtype)
                and (b.base = o.oprright or exists (select from pg_cast c where c.castsource = b.base and c.casttarget = o.oprright and c.castcontext = 'i') or a.oid = b.oid)
                and not exists (select from pg_operator x where x.oprname = o.oprname and x.oprleft = a.oid and x.oprright = b.oid)
            loop
                execute format('create operator traps.%s (leftarg = %s, rightarg = %s, function = %s)', op, a.name, b.name, fn);
            end loop;
        end loop;
        if a.oid <> a.base then
            execute format('create function traps.sum(%s) returns bigint language plpgsql as ''begin raise exception ''''trap''''; end''', a.name);
        end if;
    end loop;
end
$$;
`
