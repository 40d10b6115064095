package pgtest

import (
	"regexp"
	"strings"
)

// word is a part of a text that lines are never broken in, or the white space between two.
var word = regexp.MustCompile(`\s+|\w+|[^\w\s]`)

// Replace puts another text in each place of a text, and returns how many places there were. Where
// the text has white space, the place may have any, and next to the inside of parentheses it may
// have more: so a planted fault still finds its place in SQL whose lines are broken elsewhere. White
// space at an end of the text stays as it is in the place: the line before may end with a comment.
func Replace(in, old, by string) (out string, places int) {
	const space = " \t\n"
	if begins := strings.TrimLeft(old, space); begins != old {
		old, by = begins, strings.TrimLeft(by, space)
	}
	if ends := strings.TrimRight(old, space); ends != old {
		old, by = ends, strings.TrimRight(by, space)
	}
	var pattern strings.Builder
	last := ""
	for _, w := range word.FindAllString(old, -1) {
		switch {
		case strings.TrimSpace(w) == "":
			if last != "(" && last != "[" {
				pattern.WriteString(`\s+`)
			}
		case w == "(" || w == "[":
			pattern.WriteString(regexp.QuoteMeta(w) + `\s*`)
		case w == ")" || w == "]":
			pattern.WriteString(`\s*` + regexp.QuoteMeta(w))
		default:
			pattern.WriteString(regexp.QuoteMeta(w))
		}
		last = w
	}
	out = regexp.MustCompile(pattern.String()).ReplaceAllStringFunc(in, func(string) string {
		places++
		return by
	})
	return out, places
}
