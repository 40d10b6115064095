package schema

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pgmetered/metered/internal/lockkey"
)

// Upgrade says what an upgrade to a release does.
type Upgrade struct {
	To *Release
	// From is the installed version. That of To re-creates missing and different objects.
	From int
	// Missing are the keys of functions and types that From has and that are not there.
	Missing []string
	// DropPrevious also drops the functions that only the version before To calls.
	DropPrevious bool
}

// SQL is the upgrade as one text, under the schema's default name. It replaces the functions that
// From and To share, makes new ones beside them, and leaves those that only From calls, for
// processes of that build. It drops those that only earlier versions call.
func (u Upgrade) SQL() string {
	var b strings.Builder
	b.WriteString(guard(u.From))
	before := slices.DeleteFunc(u.To.keysOf(u.From), func(key string) bool { return slices.Contains(u.Missing, key) })
	all := statements(u.To.definitions())
	for _, s := range all {
		if (s.verb == "create type" || s.verb == "create domain") && !slices.Contains(before, "type "+s.name) {
			b.WriteString("\n" + s.text)
		}
	}
	for v := u.From + 1; v <= u.To.Version; v++ {
		b.WriteString("\n" + u.To.migration(v))
	}
	for _, s := range all {
		switch s.verb {
		case "create function":
			b.WriteString("\n" + strings.Replace(s.text, "create function", "create or replace function", 1))
		case "create view":
			b.WriteString("\n" + replaceView(s))
		case "comment on":
			if u.From < u.To.Version { // a repair leaves comments as they are
				b.WriteString("\n" + s.text)
			}
		}
	}
	b.WriteString("\n" + u.To.revokeFromPublic(false) + "\n" + onCitusSQL + "\n" + u.To.carryGrants(before))
	if drops := dropSQL(u.Drops()); drops != "" {
		b.WriteString("\n" + drops)
	}
	b.WriteString("\n" + mendSQL)
	if u.From < u.To.Version {
		fmt.Fprintf(&b, "\ninsert into metered.schema_version (version) values (%d);\n", u.To.Version)
	}
	return b.String()
}

// replaceView replaces a view. A view that loses a column is dropped first, and its readers can
// read the new one. If another view depends on the old one, the upgrade fails.
func replaceView(s statement) string {
	_, query, _ := strings.Cut(s.text, "create view metered."+s.name+" as\n")
	return fmt.Sprintf(replaceViewSQL, s.name, strings.TrimSuffix(strings.TrimSpace(query), ";"))
}

const replaceViewSQL = `do $$
declare
    query  text := $view$%[2]s$view$;
    grants text[];
    again  text;
begin
    execute 'create or replace view metered.%[1]s as ' || query;
exception when invalid_table_definition then
    grants := array(
        select format('grant %%s on metered.%[1]s to %%s', a.privilege_type, case when a.grantee = 0 then 'public' else a.grantee::regrole::text end)
        from pg_class c, aclexplode(c.relacl) a where c.oid = to_regclass('metered.%[1]s') and a.grantee <> c.relowner);
    drop view metered.%[1]s;
    execute 'create view metered.%[1]s as ' || query;
    foreach again in array grants loop
        execute again;
    end loop;
end
$$;
`

// MigrationLock is the advisory lock that migrations queue on, also those of a tool.
var MigrationLock = lockkey.Of("metered/migrate", "")

// guard queues behind other migrations, and stops at another version.
func guard(version int) string { return fmt.Sprintf(guardSQL, MigrationLock, version) }

const guardSQL = `do $$
begin
    perform pg_advisory_xact_lock(%[1]d);
    if (select max(version) from metered.schema_version) is distinct from %[2]d then
        raise exception 'the schema is not of version %[2]d';
    end if;
end
$$;
`

// mendSQL moves sequences on that logical replication left behind.
const mendSQL = `do $$
begin
    perform metered._mend_numbers();
end
$$;
`

// Drops are the keys of the functions and types that the upgrade drops if they are there.
func (u Upgrade) Drops() []string {
	var history [][]string
	for v := 1; v < u.To.Version; v++ {
		history = append(history, u.To.keysOf(v))
	}
	return superseded(history, u.To.wants, u.DropPrevious)
}

// DropPreviousSQL is the part that Upgrade.DropPrevious adds, for a schema of this version.
func (r *Release) DropPreviousSQL() string {
	return guard(r.Version) + "\n" + dropSQL(Upgrade{To: r, DropPrevious: true}.Drops())
}

// Script brings a schema n of the version from to this one, as a file for a tool: the whole schema
// (0), an upgrade, or a repair.
func (r *Release) Script(n Name, from int, dropPrevious bool, tool string) string {
	sql := ""
	switch {
	case from == 0:
		sql = r.Source()
	case from == r.Version && dropPrevious:
		sql = r.DropPreviousSQL()
	default:
		sql = Upgrade{To: r, From: from, DropPrevious: dropPrevious}.SQL()
	}
	return Tools[tool](Script(n.SQL(sql)))
}

// superseded are the keys of functions that only versions before the last of the history call, or
// before current with withLast. history has the keys of version 1 first.
func superseded(history [][]string, current func(key string) bool, withLast bool) []string {
	var kept []string
	if last := len(history) - 1; last >= 0 && !withLast {
		kept, history = history[last], history[:last]
	}
	keys := slices.DeleteFunc(slices.Concat(history...), func(key string) bool {
		return current(key) || slices.Contains(kept, key)
	})
	slices.Sort(keys)
	return slices.Compact(keys)
}

// dropSQL drops all functions in one statement, and all types: these may mention each other.
func dropSQL(keys []string) string {
	var b strings.Builder
	for _, kind := range []string{"function", "type"} {
		var names []string
		for _, key := range keys {
			if name, ok := strings.CutPrefix(key, kind+" "); ok {
				names = append(names, "metered."+name)
			}
		}
		if len(names) > 0 {
			fmt.Fprintf(&b, "drop %s if exists\n    %s;\n", kind, strings.Join(names, ",\n    "))
		}
	}
	return b.String()
}

// callable are the keys of functions and types, sorted.
func callable(objects map[string]Object) []string {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(objects)), func(key string) bool {
		return objects[key].Kind != "function" && objects[key].Kind != "type"
	})
	slices.Sort(keys)
	return keys
}
