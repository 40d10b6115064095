package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Touched are the types that statements touch, by their oids, and the names of the operators that
// they use.
type Touched struct {
	Types     []uint32
	Operators []string
}

// SetTraps creates a schema, traps, with operators that fit pairs of types better than those of
// pg_catalog do. All of them raise. The types are those of all columns of the library's and of
// River's tables and views, and those that statements touch.
func SetTraps(t testing.TB, pool *pgxpool.Pool, touched Touched) {
	t.Helper()
	_, err := pool.Exec(t.Context(), "create schema traps; create table traps.touched (oid oid); create table traps.used (used name)", pgx.QueryExecModeSimpleProtocol)
	if err == nil {
		_, err = pool.Exec(t.Context(), "with t as (insert into traps.touched select unnest($1::oid[])) insert into traps.used select unnest($2::text[])", touched.Types, touched.Operators)
	}
	if err == nil {
		_, err = pool.Exec(t.Context(), trapsSQL, pgx.QueryExecModeSimpleProtocol)
	}
	if err != nil {
		t.Fatalf("pgtest: setting traps: %v", err)
	}
}

const trapsSQL = `
create function traps.trap() returns bool language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, regprocedure) returns text language plpgsql as 'begin raise exception ''trap''; end';
create function traps.format(text, text, int, text, text) returns text language plpgsql as 'begin raise exception ''trap''; end';

do $$
declare
    pair record;
begin
    set local client_min_messages = error;
    set local check_function_bodies = off;
    create temp table of_traps on commit drop as
    select t.oid, t.typtype, t.typcategory, format_type(t.oid, null) as name, coalesce(nullif(t.typbasetype, 0), t.oid) as base
    from pg_type t
    where t.typtype <> 'p' and t.oid in (
        select x.atttypid from pg_attribute x join pg_class c on c.oid = x.attrelid
        where c.relkind in ('r', 'v') and x.attnum > 0 and not x.attisdropped
        and (c.relnamespace = to_regnamespace('metered') or c.relname ~ '^river_')
        union all select oid from traps.touched);

    -- what an operator of pg_catalog may want to take a type, which is another
    create temp table fits on commit drop as
    select t.oid as typ, t.base as want from of_traps t
    union select t.oid, c.casttarget from of_traps t join pg_cast c on c.castsource = t.base and c.castcontext = 'i'
    union select t.oid, p.oid from of_traps t join pg_type p on p.typtype = 'p' and case p.typname
        when 'anyarray' then t.typcategory = 'A'
        when 'anycompatiblearray' then t.typcategory = 'A'
        when 'anyenum' then t.typtype = 'e'
        when 'anyrange' then t.typtype = 'r'
        when 'anymultirange' then t.typtype = 'm'
        when 'record' then t.typtype = 'c'
        else p.typname in ('anyelement', 'anynonarray', 'anycompatible', 'anycompatiblenonarray') end;

    -- A literal has no type, and is taken for one of the type at the other side. There are tens of
    -- thousands, so they are not made by statements. One function without arguments serves all.
    set local allow_system_table_mods = on;
    insert into pg_operator (oid, oprname, oprnamespace, oprowner, oprkind, oprcanmerge, oprcanhash,
        oprleft, oprright, oprresult, oprcom, oprnegate, oprcode, oprrest, oprjoin)
    select (2000000000 + row_number() over ())::oid, o.oprname, 'traps'::regnamespace, current_user::regrole,
        'b', false, false, o.l, o.r, 'bool'::regtype, 0, 0, 'traps.trap'::regproc, 0, 0
    from (
        select o.oprname, one.typ as l, two.typ as r
        from pg_operator o join fits one on one.want = o.oprleft join fits two on two.want = o.oprright
        where o.oprnamespace = 'pg_catalog'::regnamespace
        union select o.oprname, one.typ, one.typ from pg_operator o join fits one on one.want in (o.oprleft, o.oprright)
        where o.oprnamespace = 'pg_catalog'::regnamespace and o.oprleft <> 0
    ) o
    where o.oprname in (select used from traps.used)
        and not exists (select from pg_operator x where x.oprname = o.oprname and x.oprleft = o.l and x.oprright = o.r);
    for pair in select * from of_traps where oid <> base loop
        execute format('create function traps.sum(%s) returns bigint language plpgsql as ''begin raise exception ''''trap''''; end''', pair.name);
    end loop;
end
$$;
`
