package schema

import (
	"fmt"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Bound is the most that an argument of a function may be which roles may execute. A field of a
// composite type has the bound of an argument of the same name. Each text, JSON, bytea and array
// has one, and each number that decides how long a call waits or how much it does. Any other
// argument is bounded by its type.
type Bound struct {
	Names string // of arguments and fields
	Max   int
	Unit  Unit
	In    string // the functions that it is for; "" for all others
}

// Unit is the unit of Bound.Max.
type Unit string

// The units. Each text of an array has as many bytes as one of its name.
const (
	Bytes Unit = "bytes"
	Lines Unit = "lines"
	Items Unit = "items"
	Value Unit = "as a number"
)

// Bounds are all bounds. Each function checks its arguments first (SQLSTATE 22023).
var Bounds = []Bound{
	{"scope of_scope of_consumer child of_child only_scope only_scopes claim scopes without total_scope", 255, Bytes, ""},
	{"id of_id ids operation tenant of_tenant op_tenant holder entity", 255, Bytes, ""},
	{"owner of_owner by_whom reference of_reference of_plan to_plan renewal category name named", 255, Bytes, ""},
	{"of_queue of_key of_kind prefix marker mode policy zone uses", 255, Bytes, ""},
	{"kind queue token", 255, Bytes, ""},
	{"channel", 64, Bytes, ""},
	{"purpose for_purpose", 128, Bytes, ""},
	{"subject for_subject", 512, Bytes, ""},
	{"note total_note payload reasons", 8192, Bytes, ""},
	{"metadata", 65536, Bytes, ""},
	{"limits", 65536, Bytes, "v1_charge v1_check v1_usage v1_hold v1_enqueue"},
	{"parking resting args", 16 << 20, Bytes, ""},
	{"of_result of_refusal given content answer", 1 << 20, Bytes, ""},
	{"fingerprint of_fingerprint digest token_digest of_digest", 33, Bytes, ""},
	{"whole", 2048, Bytes, ""}, // a limit with its thresholds
	{"thresholds", 1536, Bytes, ""},
	{"thresholds", 8, Lines, ""},

	{"charges used only_scopes", 64, Items, ""},
	{"charges events", 1000, Items, "charge_each"},
	{"limits uses", 16, Items, ""}, // also of jsonb
	{"minimum", 65, Items, ""},
	{"scopes", 64, Items, "lock_scopes retire_scopes"},
	{"scopes", 1000, Items, "create_scopes"},
	{"scopes windows periods", 1024, Items, "usage usage_of"},
	{"scopes keys id_keys", 10_000, Items, "lock_all with_sums"},
	{"times", 2001, Items, ""},
	{"ids issued", 100, Items, ""},
	{"named", 1000, Items, "lock_all"},
	{"without", 10_000, Items, "sweep_wallets"},
	{"nos units", 10_000, Items, ""},
	{"minted jobs reasons", 1000, Items, ""},

	{"wait_ms", 3_600_000, Value, ""},
	{"max_rows max_holds max_lots roll_again", 10_000, Value, ""},
	{"max_rows", 100_000, Value, "purge_scope"},
	{"look", 100_000, Value, ""},
	{"most max_jobs", 1000, Value, ""},
	{"in_cell of_cells", 256, Value, ""},
	{"of_priority", 4, Value, ""},
	{"uses share of_history", 1_000_000, Value, ""},
}

// BoundOf is the bound of an argument, or of a field of one, 0 for none.
func BoundOf(function, name string, unit Unit) (most int) {
	for _, b := range Bounds {
		if b.Unit != unit || !slices.Contains(strings.Fields(b.Names), name) {
			continue
		}
		if slices.Contains(strings.Fields(b.In), function) {
			return b.Max
		}
		if b.In == "" {
			most = b.Max
		}
	}
	return most
}

// withNulls are arrays in which a null means something: a limit by period has no window, one by a
// window no period, and an id no time.
var withNulls = []string{"windows", "periods", "issued"}

// field is an argument, or one of a composite type.
type field struct{ name, typ string }

var (
	compositeType = regexp.MustCompile(`(?s)\Acreate type metered\.(\w+) as \((.*?)\);`)
	functionHead  = regexp.MustCompile(`(?s)\Acreate function metered\.([a-z_0-9]+)\((.*?)\)\s*\n?(?:returns|language)`)
	outArgument   = regexp.MustCompile(`^out `)
)

// fieldsOf are the fields or arguments of a list, without those that are answers.
func fieldsOf(list string) (all []field) {
	for _, one := range strings.Split(list, ",") {
		one = strings.Join(strings.Fields(one), " ")
		if one == "" || outArgument.MatchString(one) {
			continue
		}
		one, _, _ = strings.Cut(one, " default ")
		name, typ, _ := strings.Cut(one, " ")
		all = append(all, field{name, strings.TrimSuffix(typ, ` collate "C"`)})
	}
	return all
}

// bounded are the composite types, by name, in the order of their definitions.
func bounded(sql string) (names []string, types map[string][]field) {
	types = map[string][]field{}
	for at := range occurrences(sql, "create type metered.") {
		if m := compositeType.FindStringSubmatch(sql[at:]); m != nil {
			names = append(names, m[1])
			types[m[1]] = fieldsOf(m[2])
		}
	}
	return names, types
}

// occurrences are the places of a text at which a line begins with a prefix. To look for it is much
// faster than a regular expression.
func occurrences(text, prefix string) iter.Seq[int] {
	return func(yield func(int) bool) {
		for at := 0; ; at += len(prefix) {
			next := strings.Index(text[at:], prefix)
			if next < 0 {
				return
			}
			if at += next; (at == 0 || text[at-1] == '\n') && !yield(at) {
				return
			}
		}
	}
}

// The size of an array of composites in bytes up to which nobody looks into it here: a charge with
// ten limits is smaller. A compressed field can be larger than it looks: that is checked where the
// field is used.
const looked = 1400

// beyond are the conditions under which a value is beyond its bounds, not one of them if it is
// null.
func beyond(function, at string, f field, types map[string][]field) (all []string) {
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	element, array := strings.CutSuffix(f.typ, "[]")
	composite := types[strings.TrimPrefix(element, "metered.")]
	octets := BoundOf(function, f.name, Bytes)
	switch {
	case array:
		add("array_lower(%s, 1) <> 1", at)
		add("array_ndims(%s) <> 1", at)
		// json has no equality, and array_position asks for one. Such a function finds a null where
		// it reads the element.
		json := slices.ContainsFunc(composite, func(inner field) bool { return inner.typ == "json" })
		if !json && !slices.Contains(withNulls, f.name) {
			add("array_position(%s, null) is not null", at)
		}
		add("cardinality(%s) > %d", at, BoundOf(function, f.name, Items))
		if composite != nil {
			most := fmt.Sprint(looked)
			if function == "charge_each" && at == f.name { // of many
				most = fmt.Sprintf("%d * cardinality(%s)", looked, at)
			}
			add("pg_column_size(%[1]s) > %[2]s and not metered._fits(%[1]s)", at, most)
		} else if octets > 0 {
			add("pg_column_size(%s) > %d and not metered._fits(%s, %d)", at, octets, at, octets)
		}
	case composite != nil:
		if strings.Contains(at, ".") {
			at = "(" + at + ")"
		}
		for _, inner := range composite {
			all = append(all, beyond(function, at+"."+inner.name, inner, types)...)
		}
	case octets > 0 && (f.typ == "text" || f.typ == "bytea"):
		add("octet_length(%s) > %d", at, octets)
	case octets > 0 && (f.typ == "json" || f.typ == "jsonb"):
		add("pg_column_size(%s) > %d", at, octets+4)
		add("pg_column_compression(%s) is not null and octet_length(%s::text) > %d", at, at, octets)
		if most := BoundOf(function, f.name, Items); most > 0 {
			add("jsonb_typeof(%s) <> 'array'", at) // the length of anything else is an error
			add("jsonb_array_length(%s) > %d", at, most)
		}
		if f.name == "note" && strings.HasPrefix(function, "v1_") {
			add("jsonb_typeof(%s) <> 'object'", at)
		}
	case BoundOf(function, f.name, Value) > 0 && f.typ == "int":
		add("%s > %d", at, BoundOf(function, f.name, Value))
	}
	if lines := BoundOf(function, f.name, Lines); lines > 0 && f.typ == "text" {
		add("octet_length(%[1]s) - octet_length(replace(%[1]s, chr(10), '')) >= %[2]d", at, lines)
	}
	return all
}

// fits are functions that look into composites: whether all of an array are within their bounds.
func fits(sql string) string {
	var b strings.Builder
	names, types := bounded(sql)
	b.WriteString(fitsTextsSQL)
	for _, name := range names {
		conditions := beyond("", "x", field{"x", "metered." + name}, types)
		if len(conditions) > 0 && slices.Contains(inArrays, name) {
			fmt.Fprintf(&b, fitsSQL, name, strings.Join(together(conditions), "\n            or "))
		}
	}
	return b.String()
}

const fitsTextsSQL = `-- Whether no text is longer than so many bytes.
create function metered._fits(texts text[], most int) returns boolean
language plpgsql immutable strict
as $$
declare
    x text;
begin
    foreach x in array texts loop
        if octet_length(x) > most then
            return false;
        end if;
    end loop;
    return true;
end
$$;
`

const fitsSQL = `
-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.%[1]s[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.%[1]s;
begin
    foreach x in array all_of loop
        if %[2]s then
            return false;
        end if;
    end loop;
    return true;
end
$$;
`

// inArrays are the composites of which arrays are passed.
var inArrays = strings.Fields("period charge_limit new_charge hold_ids used_units new_event new_token")

// withBounds puts the check of the bounds at the beginning of each function that roles may execute.
func withBounds(sql string) string {
	_, types := bounded(sql)
	starts := map[string]int{} // of functions
	const create = "create function metered."
	for at := range occurrences(sql, create) {
		name, _, _ := strings.Cut(sql[at+len(create):], "(")
		starts[name] = at
	}
	guards := map[int]string{} // by where they stand
	for _, f := range Functions {
		start := starts[f.Name]
		head := functionHead.FindStringSubmatch(sql[start:])
		var conditions, rare, some []string
		for _, arg := range fieldsOf(head[2]) {
			of := beyond(f.Name, arg.name, arg, types)
			if len(of) > 0 && mostlyNull(f.Name, arg) {
				rare, some = append(rare, of...), append(some, arg.name+" is not null")
			} else {
				conditions = append(conditions, of...)
			}
		}
		if len(conditions)+len(rare) == 0 {
			continue
		}
		what := fmt.Sprintf("'out of bounds: an argument of %s'", f.Name)
		for _, condition := range conditions {
			if m := noList.FindStringSubmatch(condition); m != nil {
				what = fmt.Sprintf("'out of bounds: %%',\n            case when %s then '%s' else 'an argument of %s' end",
					condition, m[1], f.Name)
			}
		}
		guard := ""
		if len(conditions) > 0 {
			guard = fmt.Sprintf(guardBoundsSQL, strings.Join(together(conditions), "\n        or "), what)
		}
		if len(rare) > 0 {
			guard += fmt.Sprintf(guardSomeSQL, strings.Join(some, " or "), strings.Join(together(rare), "\n            or "), what)
		}
		guards[start+strings.Index(sql[start:], "\nbegin\n")+len("\nbegin\n")] = guard
	}
	var with strings.Builder
	done := 0
	for _, body := range slices.Sorted(maps.Keys(guards)) {
		with.WriteString(sql[done:body] + guards[body])
		done = body
	}
	return with.String() + sql[done:]
}

// noList is the condition that an argument in JSON is no list. It is the one that is named.
var noList = regexp.MustCompile(`^jsonb_typeof\((\w+)\) <> 'array'$`)

var lengthBound = regexp.MustCompile(`^(octet_length\([\w.()]+\)) > (\d+)$`)

// together compares lengths that have one bound at once, which is cheaper.
func together(conditions []string) (all []string) {
	lengths := map[string][]string{}
	at := map[string]int{}
	for _, c := range conditions {
		m := lengthBound.FindStringSubmatch(c)
		if m == nil {
			all = append(all, c)
			continue
		}
		most := m[2]
		if lengths[most] = append(lengths[most], m[1]); len(lengths[most]) == 1 {
			at[most] = len(all)
			all = append(all, c)
		} else {
			all[at[most]] = fmt.Sprintf("greatest(%s) > %s", strings.Join(lengths[most], ", "), most)
		}
	}
	return all
}

// mostlyNull reports whether an argument is null in most calls. Then its conditions are not prepared.
// A list in JSON is given.
func mostlyNull(function string, arg field) bool {
	return (arg.typ == "json" || arg.typ == "jsonb") && BoundOf(function, arg.name, Items) == 0 || arg.name == "whole"
}

const guardSomeSQL = `    if %s then
        if %s then
            raise exception %s using errcode = '22023';
        end if;
    end if;
`

const guardBoundsSQL = `    if %s then
        raise exception %s using errcode = '22023';
    end if;
`
