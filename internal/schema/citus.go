package schema

// onCitusSQL says to a schema that is a shard that it is one (_sharded), and has Citus plan some
// statements anew at each call. It cannot make a generic plan of an insert from a function, or of a
// statement with a CTE that writes, and says so by a cost that plan_cache_mode = force_generic_plan
// would not look at.
const onCitusSQL = `-- On Citus: locks are taken on the node that has the tables, and a statement that has no generic plan is planned at each call.
do $$
declare
    sharded boolean := false;
    f       regprocedure;
begin
    if to_regclass('pg_catalog.pg_dist_schema') is not null then
        execute 'select exists (select from pg_catalog.pg_dist_schema where schemaid = $1)' into sharded using to_regnamespace('metered');
    end if;
    if sharded then
        create or replace function metered._sharded() returns boolean language sql immutable as 'select true';
    end if;
    for f in
        select p.oid from pg_proc p
        where sharded and p.pronamespace = to_regnamespace('metered') and 'plan_cache_mode=force_generic_plan' = any (p.proconfig)
        order by p.oid
    loop
        execute format('alter function %s set plan_cache_mode = auto', f);
    end loop;
end
$$;
`
