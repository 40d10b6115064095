package schema

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Table is a table or a view that roles may read.
type Table struct {
	Name  string
	Roles Role
}

// Tables are all that a role may read. A reporting role does not read tokens, operations and keys
// of jobs themselves: a view has the columns that it may see.
var Tables = []Table{
	{"ledger", Application | Maintenance | Reporting},
	{"tallies", Application | Reporting},
	{"refund_sum", Application | Reporting},
	{"lease_sum", Application | Reporting},
	{"resources", Application | Reporting},
	{"leases", Application | Reporting},
	{"lease_spends", Application | Reporting},
	{"holds", Application | Reporting},
	{"hold_lines", Application | Reporting},
	{"hold_events", Application | Reporting},
	{"lots", Application | Reporting},
	{"lot_rows", Application | Reporting}, // on Citus a node reads the table of a view as the role
	{"lot_moves", Application | Reporting},
	{"lot_holds", Application | Reporting},
	{"lot_debts", Application | Reporting},
	{"holds_horizon", Application | Reporting},
	{"operations", Application},
	{"job_keys", Application},
	{"parked_jobs", Application | Jobs},
	{"parked_scopes", Application | Jobs | Reporting},
	{"feed_lag", Application | Maintenance | Reporting},
	{"schema_version", Application | Maintenance | Jobs | Reporting},
	{"statement", Reporting},
	{"scopes", Reporting},
	{"holds_words", Reporting},
	{"hold_events_words", Reporting},
	{"leases_words", Reporting},
	{"lease_spends_words", Reporting},
	{"operations_words", Reporting},
	{"tokens_words", Reporting},
	{"lots_words", Reporting},
	{"lots_statement", Reporting},
	{"parked_scopes_words", Application | Reporting},
	{"parked_jobs_words", Reporting},
	{"cell", Reporting},
	{"tenants", Reporting},
	{"notary_scopes", Reporting},
	{"notary_runs", Reporting},
	{"notary_hashes", Reporting},
	{"notary_heads", Reporting},
}

// GrantSQL renders the grants for a set of calls, in the schema n, to the role, which is quoted.
// Functions are named with their arguments: those of the version before may be there, too.
func (r *Release) GrantSQL(n Name, set Role, role string) string {
	return Script(n.SQL(r.revokeFromPublic(true)) + fmt.Sprintf(`
grant usage on %[1]s to %[4]s;
grant select on
    %[2]s
    to %[4]s;
grant execute on function
    %[3]s
    to %[4]s;
`, n.SQL("schema metered"), n.SQL(strings.Join(readable(set), ", ")), n.SQL(strings.Join(r.executable(set), ",\n    ")), role))
}

func readable(set Role) []string {
	var names []string
	for _, t := range Tables {
		if t.Roles&set != 0 {
			names = append(names, "metered."+t.Name)
		}
	}
	return names
}

func (r *Release) executable(set Role) []string {
	var names []string
	for _, f := range Functions {
		if f.Roles&set != 0 {
			for _, s := range r.signatures(f.Name) {
				names = append(names, "metered."+s)
			}
		}
	}
	return names
}

// revokeFromPublic takes from everybody the functions that bear a name of this schema's, of any
// version. A dump without privileges (pg_dump -x) gives them to everybody.
func (r *Release) revokeFromPublic(tell bool) string {
	names := make(map[string]bool)
	for _, s := range statements(r.definitions()) {
		if s.verb == "create function" {
			names[s.name] = true
		}
	}
	for _, before := range r.history {
		for _, o := range before {
			if name, _, ok := strings.Cut(o.Name, "("); ok && o.Kind == "function" {
				names[name] = true
			}
		}
	}
	notice := ""
	if tell {
		notice = "\n        raise notice 'everybody could execute %', f;"
	}
	return fmt.Sprintf(revokeSQL, wrapped(slices.Sorted(maps.Keys(names))), notice)
}

const revokeSQL = `-- Nothing is for everybody. See metered.GrantSQL.
do $$
declare
    f regprocedure;
begin
    for f in
        select p.oid from pg_proc p
        where p.pronamespace = to_regnamespace('metered') and p.proname = any ('{%s}')
          and exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)
        order by p.oid
    loop%s
        execute format('revoke all on function %%s from public', f);
    end loop;
end
$$;
`

// carryGrants gives the roles that could make the calls of an earlier version the grants for those
// of this one. before are the keys of the functions that were there.
//
// A role that could execute all of a set's functions gets the set. A role that could execute some
// gets those of the same names.
func (r *Release) carryGrants(before []string) string {
	had := func(name string) bool {
		return slices.ContainsFunc(before, func(key string) bool { return strings.HasPrefix(key, "function "+name+"(") })
	}
	var b strings.Builder
	for _, set := range []Role{Application, Maintenance, Jobs} {
		var names []string
		pairs := "" // name and signature
		for _, f := range Functions {
			if f.Roles&set == 0 {
				continue
			}
			if had(f.Name) {
				names = append(names, f.Name)
			}
			for _, s := range r.signatures(f.Name) {
				pairs += fmt.Sprintf(",\n            ('%s', 'metered.%s')", f.Name, s)
			}
		}
		fmt.Fprintf(&b, carrySQL, wrapped(names), strings.TrimPrefix(pairs, ","), strings.Join(readable(set), ", "))
	}
	fmt.Fprintf(&b, carryReportingSQL, strings.Join(readable(Reporting), ", "), strings.Join(r.executable(Reporting), ", "))
	return b.String()
}

// carryReportingSQL goes by a view, since all that a reporting role may execute is an
// application's, too.
const carryReportingSQL = `-- Whoever could read the reports can read those of this version.
do $$
declare
    role regrole;
begin
    for role in
        select a.grantee from pg_class c, aclexplode(c.relacl) a
        where c.oid = to_regclass('metered.statement') and a.privilege_type = 'SELECT' and a.grantee not in (0, c.relowner)
    loop
        execute format('grant select on %s to %%s', role);
        execute format('grant execute on function %s to %%s', role);
    end loop;
end
$$;
`

const carrySQL = `-- Whoever could make the calls of the version before can make those of this one.
do $$
declare
    had text[] := '{%s}';
    g   record;
begin
    for g in
        with held as (
            select distinct p.proname::text as name, a.grantee
            from pg_proc p, aclexplode(p.proacl) a
            where p.pronamespace = to_regnamespace('metered') and p.proname = any (had)
              and a.grantee <> 0 and a.grantee <> p.proowner
        ), whole as (
            select h.grantee from held h group by h.grantee having count(*) = cardinality(had)
        ), functions (name, signature) as (values %s
        )
        select f.signature, r.oid::regrole as role, r.oid in (select w.grantee from whole w) as whole
        from functions f, pg_roles r
        where r.oid in (select w.grantee from whole w union select h.grantee from held h where h.name = f.name)
    loop
        execute format('grant execute on function %%s to %%s', g.signature, g.role);
        if g.whole then
            execute format('grant select on %s to %%s', g.role);
        end if;
    end loop;
end
$$;
`

// wrapped lists names in lines that fit a page.
func wrapped(names []string) string {
	var b strings.Builder
	width := 0
	for i, name := range names {
		if i > 0 {
			b.WriteByte(',')
			if width += len(names[i-1]) + 1; width > 90 {
				b.WriteString("\n            ")
				width = 0
			}
		}
		b.WriteString(name)
	}
	return b.String()
}
