package command_test

import (
	"slices"
	"strconv"
	"strings"

	"github.com/stretchr/testify/require"
)

// hostileType is a type of the catalog.
type hostileType struct {
	name          string
	element, base uint32 // of an array, of a domain
	fields        []uint32
	names         []string // of the fields
	values        []string
}

func (h *hostile) typeOf(oid uint32) hostileType {
	if known, ok := h.types[oid]; ok {
		return known
	}
	var typ hostileType
	require.NoError(h, h.owner.QueryRow(h.Context(), `
		select format_type(t.oid, null), case when t.typcategory = 'A' and t.typtype = 'b' then t.typelem else 0 end, t.typbasetype,
			coalesce(f.types, '{}'), coalesce(f.names, '{}')
		from pg_type t, lateral (select array_agg(a.atttypid order by a.attnum) as types, array_agg(a.attname::text order by a.attnum) as names
			from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped and t.typtype = 'c') f
		where t.oid = $1`, oid).Scan(&typ.name, &typ.element, &typ.base, &typ.fields, &typ.names))
	typ.values = hostileValues[typ.name]
	if typ.name == "bigint" {
		for _, scope := range []string{"full", "a", "seats", "credit", "w"} {
			typ.values = append(slices.Clone(typ.values), strconv.FormatInt(h.c.Budget.LockKey(scope), 10))
		}
	}
	h.types[oid] = typ
	return typ
}

// tameValues are values that make sense, by the name of the argument or of the field: most of a call is tame, so that
// the hostile value gets far.
var tameValues = map[string][]string{
	"of_scope": {"'a'", "'full'", "'seats'", "'credit'", "'w'"}, "scope": {"'a'", "'seats'", "'seats'", "'full'", "'credit'", "'w'", "'w'"}, "key": {"null"},
	"units": {"1", "2"}, "units[]": {"'{1,2,3}'"}, "amount": {"3", "2", "1"}, "held": {"0", "0", "1"}, "note": {"null", "null", "null", `'{"use": "images"}'`}, "uses[]": {"null", "'{images}'", "'{images,tokens}'"}, "max": {"1000000", "100"}, "win": {"'0'", "'1 h'"},
	"charge_seq": {"1", "2", "7", "41"}, "wait_ms": {"50"}, "ahead": {"'1 min'"}, "raising": {"false", "true"}, "channel": {"null", "null", "'c'", "'c+'"},
	"tenant": {"''", "'acme'"}, "of_tenant": {"''", "'acme'"}, "id": {"gen_random_uuid()::text"}, "of_id": {"'h0'", "'h1'", "'h2'"}, "ids": {"'{h0}'", "'{h1}'", "'{h2}'", "'{h3}'", "'{h4,h6}'", "'{h8}'", "'{h9}'"},
	"issued": {"null"}, "issued_at": {"null"}, "holder": {"''"}, "chosen": {"false", "true"}, "claim": {"null"}, "fingerprint": {"decode(repeat('01', 33), 'hex')"},
	"of_fingerprint": {"decode(repeat('01', 33), 'hex')"}, "ttl": {"'1 min'", "'10 min'"}, "grace": {"'0'", "'1 min'"}, "lifetime": {"'1 h'"}, "metadata": {"null", "'{}'"},
	"closing": {"true", "false"}, "policy": {"'refuse'", "'fit'", "'allow'"}, "entity": {"null", "'x'"}, "by": {"'1 s'"}, "skip_purged": {"false", "true"},
	"operation": {"null", "'op'"}, "max_future": {"'1 min'"}, "timeout_ms": {"0", "null"}, "marker": {"'m'"}, "of_result": {"'\\x31'"},
	"of_deadline": {"metered.clock()"}, "cutoff": {"metered.clock()", "metered.clock() - interval '1 h'"}, "after_seq": {"0"}, "max_rows": {"16", "100"}, "forgetting": {"false", "true"},
	"after": {"null"}, "after_due": {"'-infinity'"}, "after_no": {"0"}, "max_holds": {"10"}, "keep_pending": {"false", "true"}, "nos": {"'{1,2,3}'"},
	"digest": {"sha256(gen_random_uuid()::text::bytea)"}, "token_digest": {"sha256('x')"}, "purpose": {"'p'"}, "subject": {"'s'"}, "payload": {"null"}, "uses": {"1", "3"},
	"must_exist": {"null", "false", "true"}, "scopes": {"'{seats}'", "'{a,full}'", "'{new}'", "'{gone}'"}, "retiring": {"true", "false", "false"},
	"claiming": {"true"}, "opening": {"true"}, "finishing": {"true"},
	"period": {"null", "row('1 day', null, 'Europe/Berlin')", "row('30 days', metered.clock(), null)"}, "tell_at": {"null", "3"},
	"thresholds": {"null", "'3 1 x'", "E'3 0 x\\n5 2 a b'"}, "telling": {"true", "false"}, "minimum": {"null", "array[row('seats', 2, null)]"},
	"late": {"'35 days'"}, "future": {"'5 min'"}, "skip_busy": {"false", "true"}, "id_key": {"null"}, "occurred_at": {"null", "metered.clock()"},
	"events": {"null", "array[row('', 'e', null, decode(repeat('01', 33), 'hex'), null, null)]", "array[row('', gen_random_uuid()::text, null, decode(repeat('01', 33), 'hex'), null, null)]",
		"array[row('', gen_random_uuid()::text, null, decode(repeat('01', 33), 'hex'), null, null), row('', null, null, null, null, null)]"},
	"mode": {"'answer'", "'raise'", "'rows'", "'rows'", "'memory'"}, "of_child": {"'k1'", "'k2'", "'k3'", "'k4'"}, "owner": {"'me'"}, "of_owner": {"'me'", "'other'"}, "least": {"1"}, "share": {"1", "4"}, "child": {"null"},
	"lease": {"null", "null", "1", "2"}, "lease_offset": {"0", "3", "6"}, "of_no": {"1", "2", "3", "4", "5"}, "told": {"null", "1"},
	"lot": {"row(20, null, '1 h', '', 0, null, null, 3, '1 h', '1 h')", "row(20, null, null, 'paid', 1, null, null, null, null, null)",
		"row(20, metered.clock() + interval '1 h', null, '', 0, gen_random_uuid()::text, decode(repeat('01', 33), 'hex'), null, null, null)",
		"row(20, null, '10 min', '', 0, 'r1', decode(repeat('01', 33), 'hex'), 20, '0', null)"},
	"of_lot": {"1", "2", "3", "4", "5", "6", "7", "8"}, "of_reference": {"null", "null", "null", "'r1'"}, "cap": {"2", "30"}, "up_to": {"false", "true"}, "lasts": {"'1 h'", "'0'"},
	"max_lots": {"10"}, "only_scope": {"null", "'w'", "'a'"}, "keep_untold": {"false", "true"}, "after_end": {"'-infinity'"},
}

// hostileValues are values by type, some of which make sense.
var hostileValues = map[string][]string{
	"text": {"''", "'full'", "'a'", "'seats'", "'credit'", "'h1'", "'h2'", "'h9'", "'acme'", "'ann'", "'p'", "'s'", "'op'", "'refuse'", "'fit'", "'allow'",
		"repeat('x', 255)", "repeat('x', 256)", "repeat('é', 200)", "'claim/mail%2Fa'", "E'a\\u0001'", "'+'"},
	"metered.scope_name": {"'full'", "'a'", "'seats'", "'credit'", "'new'", "'claim/mail%2Fa'", "''", "repeat('x', 256)"},
	"metered.id":         {"'h0'", "'h1'", "'h2'", "'h9'", "'new'", "'op'", "''", "gen_random_uuid()::text"},
	"metered.name":       {"''", "'acme'", "'ann'", "repeat('x', 256)"},
	"metered.ids":        {"'{h1}'", "'{h0}'", "'{h0,h2}'", "'{h9,h9}'", "'{null}'", "'{}'", "'[0:0]={h1}'", "'{{h1},{h3}}'", "'{none}'"},
	"bigint": {"-1", "0", "1", "2", "3", "40", "1000000", "-1000000", "9007199254740992", "9223372036854775807", "-9223372036854775808",
		"3775460004313942042"},
	"text[]": {"'{seats}'", "'{seats,seats,a}'", "'{none}'", "'{}'", "'{null}'", "'{a,\"\"}'", "'[0:0]={a}'", "'{{a},{full}}'",
		"array[repeat('x', 256)]", "array(select g::text from generate_series(1, 1001) g)"},
	"integer":                  {"-1", "0", "1", "2", "16", "100", "1000", "2147483647", "-2147483648"},
	"boolean":                  {"true", "false"},
	"interval":                 {"'0'", "'1 s'", "'1 min'", "'1 h'", "'-1 h'", "'1 mon'", "'-1 mon 40 days'", "'-1 mon 30 days 1 us'", "'100000 days'"},
	"timestamp with time zone": {"'infinity'", "'-infinity'", "metered.clock()", "metered.clock() - interval '1 h'", "'epoch'", "'9999-12-31'"},
	"bytea":                    {"''", "'\\x00'", "decode(repeat('00', 32), 'hex')", "decode(repeat('01', 33), 'hex')", "(select sha256(random()::text::bytea))"},
	"jsonb":                    {"'{}'", "'{\"actor\": \"x\"}'", `'{"use": "images"}'`, `'{"use": {"a": 1}}'`, `'["use"]'`, `'"use"'`, "'[1]'", "to_jsonb(repeat('x', 9000))"},
	"json":                     {"'{}'", "'{\"a\": 1}'", "'1e200000'"},
	"\"char\"":                 {"'h'", "'c'", "'z'"},
}

// value is an expression of the type, of any depth.
func (h *hostile) value(oid uint32, name string) string {
	typ := h.typeOf(oid)
	pick := func(values []string) string { return "(" + values[h.rand.IntN(len(values))] + ")::" + typ.name }
	evil := h.rand.IntN(14) == 0
	if len(h.recent) > 0 && !evil && h.rand.IntN(3) > 0 {
		switch id := h.recent[h.rand.IntN(len(h.recent))]; name {
		case "ids":
			return `'{"` + id + `"}'::` + typ.name
		case "of_id":
			return "'" + id + "'::" + typ.name
		case "tenant", "of_tenant":
			return "''::" + typ.name
		}
	}
	if tame := tameValues[name]; typ.element != 0 && tameValues[name+"[]"] != nil && !evil {
		return pick(tameValues[name+"[]"])
	} else if tame != nil && !evil {
		return pick(tame)
	}
	switch {
	case evil && h.rand.IntN(3) == 0:
		return "null::" + typ.name
	case name == "used" && h.rand.IntN(2) == 0:
		return "null::" + typ.name // all that is held
	case len(typ.values) > 0:
		return pick(typ.values)
	case typ.base != 0:
		return "(" + h.value(typ.base, "") + ")::" + typ.name
	case typ.element != 0:
		elements := make([]string, h.rand.IntN(3))
		if len(elements) == 0 && h.rand.IntN(2) == 0 {
			elements = make([]string, 1)
		}
		for i := range elements {
			elements[i] = h.value(typ.element, "")
		}
		switch array := "array[" + strings.Join(elements, ", ") + "]::" + typ.name; {
		case len(elements) > 0 && evil && h.rand.IntN(2) == 0:
			return "array_fill(" + elements[0] + ", array[2], array[" + strconv.Itoa(h.rand.IntN(5)-2) + "])::" + typ.name
		case len(elements) > 0 && evil:
			return "array[array[" + strings.Join(elements, ", ") + "]]::" + typ.name
		default:
			return array
		}
	case len(typ.fields) > 0:
		fields := make([]string, len(typ.fields))
		for i, field := range typ.fields {
			fields[i] = h.value(field, typ.names[i])
		}
		return "row(" + strings.Join(fields, ", ") + ")::" + typ.name
	}
	return "null::" + typ.name
}
