-- Every table, index and function of metered.
--
-- Applied by metered.Migrate, or rendered by metered.SchemaSQL for a migration
-- tool of your own. "metered." is replaced by the schema name you choose.
--
-- Three rules hold for all of it:
--
--   * The schema's owner owns the data. An application role needs EXECUTE
--     on the functions that it calls and SELECT on tables that it reads, nothing
--     else (metered.GrantSQL): the functions that write are SECURITY DEFINER, so
--     no application can change or delete a ledger entry.
--   * Functions that an application calls fix search_path, so that no operator
--     or table of the caller's can stand in for ours, enable_seqscan = off:
--     PL/pgSQL caches plans, and a sequential scan cached while a table was
--     small makes a hot scope quadratic; and plan_cache_mode = force_generic_plan:
--     a statement that compares with an array, or lets a null decide the rest
--     of it, would be planned anew at each call, for 50 to 150 microseconds. All
--     three together cost 5 to 8 microseconds a call (Postgres 15); inner functions
--     inherit them. A plan is made while the table may be empty and any index
--     looks as good, so no condition may fit an index other than the right one.
--   * Time is read only from metered.clock(), but for how long a lock is still
--     waited for. To set the clock a test replaces that function, which its owner
--     can do and an application's role cannot.

-- CREATE SCHEMA IF NOT EXISTS alone would not do: it demands the right to create a schema
-- even where this one is there, and its owner may not have that.
do $$
begin
    if to_regnamespace('metered') is null then
        create schema if not exists metered;
    end if;
end
$$;

-- True, and makes a session on Postgres 14 faster: as it plans a statement of metered.clock(), the
-- planner works this constant out, and nothing is left of it. That takes and frees a block of a
-- megabyte, and so has glibc's malloc keep up to 2 MB of free memory. Else it
-- gives memory beyond 128 kB back to the kernel, and asks for it again up to four times in a
-- place, a capture or a release: 15 to 19 percent of their time. See ADR 8. Later versions do
-- that by themselves, and the block, taken at each statement that is planned, would be a third of
-- the first call on a new connection.
create function metered.keep_memory() returns boolean
language sql immutable parallel safe
as 'select pg_catalog.octet_length(pg_catalog.repeat(pg_catalog.repeat('' '', 1000),
    case when pg_catalog.current_setting(''server_version_num'')::pg_catalog.int4 operator(pg_catalog.<) 150000 then 1000 else 1 end)) operator(pg_catalog.>) 0';

-- The only clock. clock_timestamp(), because now() is the start of the
-- transaction, and a slow one would write entries already outside their window.
create function metered.clock() returns timestamptz
language sql volatile parallel safe
as 'select case when metered.keep_memory() then pg_catalog.clock_timestamp() end';
