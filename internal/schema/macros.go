package schema

import (
	"fmt"
	"regexp"
	"strings"
)

// A macro is text that stands in several statements: a call of a function there would cost more than what it runs. It is
// written in braces, and stands for SQL:
//
//	{entry columns}                              the columns of an entry of the ledger
//	{entry of tip: amount = 5, kind = 'c'}       the values of a new entry after tip, which copies every other column from it
//	{base: scope = s, epoch = e, since = t}      from-items: base is the last entry of a scope's epoch at or before a time. mark is on its way there
var macro = regexp.MustCompile(`(?s)\{(entry columns|entry of (\w+)|base)(?:: (.*?))?\}`)

// entryColumns are the columns of an entry, in the order of the table.
var entryColumns = strings.Fields("seq amount at spent refunded credited held epoch kind scope next_due hold operation_tenant operation note anchor_at anchor_spent lots_end crossed")

// expand replaces the macros of a text of SQL.
func expand(sql string) string {
	return macro.ReplaceAllStringFunc(sql, func(text string) string {
		m := macro.FindStringSubmatch(text)
		given := macroArguments(m[3])
		switch {
		case m[1] == "entry columns":
			return strings.Join(entryColumns, ", ")
		case m[1] == "base":
			return baseOf(given)
		}
		values := make([]string, len(entryColumns))
		for i, name := range entryColumns {
			value, changed := given[name]
			if !changed {
				value = m[2] + "." + name
			}
			values[i] = value
			delete(given, name)
		}
		if len(given) > 0 {
			panic(fmt.Sprintf("%s: no columns of an entry: %v", text, given))
		}
		return strings.Join(values, ", ")
	})
}

// baseOf finds an entry in the index over time, which has each sixteenth one, and reads on to the last one in time. if is a further condition.
func baseOf(given map[string]string) string {
	also := ""
	if given["if"] != "" {
		also = " and " + given["if"]
	}
	return strings.NewReplacer("$scope", given["scope"], "$epoch", given["epoch"], "$since", given["since"], "$also", also).Replace(
		`(select y.seq from metered.ledger y
                where y.scope = $scope and y.epoch = $epoch and y.at <= $since and (y.seq & 15 = 1 or y.kind = 'k')$also
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = $scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = $epoch and y.at <= $since
                order by y.seq desc limit 1) base`)
}

// macroArguments reads "name = value, name = value". A comma in parentheses belongs to a value.
func macroArguments(list string) map[string]string {
	given := map[string]string{}
	depth, start := 0, 0
	add := func(end int) {
		if name, value, ok := strings.Cut(list[start:end], " = "); ok {
			given[strings.TrimSpace(name)] = strings.Join(strings.Fields(value), " ")
		}
		start = end + 1
	}
	for i, r := range list {
		switch {
		case r == '(' || r == '[':
			depth++
		case r == ')' || r == ']':
			depth--
		case r == ',' && depth == 0:
			add(i)
		}
	}
	add(len(list))
	return given
}
