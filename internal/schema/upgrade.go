package schema

import (
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pgmetered/metered/internal/lockkey"
)

// Upgrade says what an upgrade does.
type Upgrade struct {
	// From is the version that is installed; Version, to re-create what is missing or differs.
	From int
	// Missing are the keys of functions and types that From has and that are not there.
	Missing []string
	// DropPrevious also drops what only the version before Version calls.
	DropPrevious bool
}

// SQL is the upgrade as one text, under the schema's default name. What From and Version have
// in common is replaced, what is new is made beside it, and what only From calls stays, for
// processes of that build. What only versions before that call is dropped.
func (u Upgrade) SQL() string {
	var b strings.Builder
	b.WriteString(guard(u.From))
	before := slices.DeleteFunc(slices.Clone(keysOf(u.From)), func(key string) bool { return slices.Contains(u.Missing, key) })
	all := statements(definitions())
	for _, s := range all {
		if (s.verb == "create type" || s.verb == "create domain") && !slices.Contains(before, "type "+s.name) {
			b.WriteString("\n" + s.text)
		}
	}
	for v := u.From + 1; v <= Version; v++ {
		b.WriteString("\n" + file(fmt.Sprintf("migrations/%04d.sql", v)))
	}
	for _, s := range all {
		switch s.verb {
		case "create function":
			b.WriteString("\n" + strings.Replace(s.text, "create function", "create or replace function", 1))
		case "create view":
			b.WriteString("\n" + replaceView(s))
		case "comment on":
			if u.From < Version { // a repair leaves comments as they are
				b.WriteString("\n" + s.text)
			}
		}
	}
	b.WriteString("\n" + revokeFromPublic(false) + "\n" + carryGrants(before))
	if drops := dropSQL(u.Drops()); drops != "" {
		b.WriteString("\n" + drops)
	}
	if u.From < Version {
		fmt.Fprintf(&b, "\ninsert into metered.schema_version (version) values (%d);\n", Version)
	}
	return b.String()
}

// replaceView replaces a view, also by one that lacks a column of the old one: that one is dropped then, and who could
// read it can read the new one. A view of somebody's that reads the old one stops that.
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

// Drops are the keys of the functions and types that the upgrade drops if they are there.
func (u Upgrade) Drops() []string { return superseded(history, current, u.DropPrevious) }

// Previous are the keys of what only the version before Version calls.
func Previous() []string {
	return slices.DeleteFunc(slices.Clone(keysOf(Version-1)), current)
}

// DropPreviousSQL is what Upgrade.DropPrevious adds, for a schema of this version.
func DropPreviousSQL() string {
	return guard(Version) + "\n" + dropSQL(Upgrade{DropPrevious: true}.Drops())
}

// superseded are the keys of what only earlier versions than the last of the history call, or
// than current with withLast. history has the keys of version 1 first.
func superseded(history [][]string, current func(key string) bool, withLast bool) []string {
	var kept []string
	if last := len(history) - 1; !withLast {
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

// Each file lists the functions and types of an earlier version, by their keys, sorted.
//
//go:embed versions/*.txt
var versions embed.FS

// history are the keys of the functions and types of each version before Version.
var history = func() [][]string {
	var all [][]string
	for v := 1; v < Version; v++ {
		text, err := versions.ReadFile(fmt.Sprintf("versions/%04d.txt", v))
		if err != nil {
			panic(err) // it is embedded
		}
		all = append(all, strings.Split(strings.TrimSuffix(string(text), "\n"), "\n"))
	}
	return all
}()

// keysOf are the keys of the functions and types of a version.
func keysOf(version int) []string {
	if version < Version {
		return history[version-1]
	}
	return callable(wanted)
}

// callable are the keys of functions and types, sorted.
func callable(objects map[string]Object) []string {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(objects)), func(key string) bool {
		return objects[key].Kind != "function" && objects[key].Kind != "type"
	})
	slices.Sort(keys)
	return keys
}

func current(key string) bool {
	_, ok := wanted[key]
	return ok
}
