-- What a call needs of the schema $1: catalog.sql without the definitions, but for what a function takes and returns.
-- Each process runs it once, on a connection that has read no catalog yet. Run with search_path = pg_catalog.
with relations as (
    select c.oid, c.relname, c.relkind
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = $1::text and c.relkind in ('r', 'p', 'v', 'm', 'c')
)
select 'table' as kind, relname::text as name, '' as definition, false as lost, false as public from relations where relkind <> 'c'
union all
select 'type', relname, '', false, false from relations where relkind = 'c'
union all
select 'column', r.relname || '.' || a.attname, '', false, false
from relations r join pg_attribute a on a.attrelid = r.oid
where r.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped
union all
select 'type', t.typname, '', false, false
from pg_type t join pg_namespace n on n.oid = t.typnamespace
where n.nspname = $1::text and t.typtype in ('d', 'e')
union all
select 'trigger', r.relname || '.' || g.tgname, '', false, false
from relations r join pg_trigger g on g.tgrelid = r.oid where not g.tgisinternal and r.relkind <> 'v'
union all
select 'function', p.proname || '(' || oidvectortypes(p.proargtypes) || ')',
    '(' || pg_get_function_arguments(p.oid) || ')' || coalesce(' returns ' || pg_get_function_result(p.oid), '') || ' language ', false, false
from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname = $1::text
