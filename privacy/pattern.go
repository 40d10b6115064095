package privacy

import (
	"fmt"
	"strings"
	"unicode/utf16"
)

// A name stands for a person where it is a word: neither before it nor after it is a letter, a
// digit or an underscore, nor one of . @ + % - that joins it to one. So user/ann is in
// seat/user/ann/2026 and in "paid by user/ann.", and not in user/anna or user/ann.smith. Every
// character beyond ASCII is a letter here.
const (
	letter     = `[0-9A-Za-z_\u0080-\U0010ffff]`
	joined     = `[.@+%-]`
	freeBefore = `(?<!` + letter + `)(?<!` + letter + joined + `)`
	freeAfter  = `(?!` + letter + `)(?!` + joined + letter + `)`

	// In JSON, \n and \u000a before a name are no letters, and \u00e9 after it is one.
	escapeBefore  = `(?<=\\[bfnrt])|(?<=\\u00[0-7][0-9A-Fa-f])`
	noLetterAfter = `(?!\\u(?:[1-9A-Fa-f]|0[1-9A-Fa-f]|00[89A-Fa-f]))`
)

// plainPattern is a regular expression of Postgres that finds a name in text.
func plainPattern(name string) string {
	var b strings.Builder
	b.WriteString(freeBefore)
	for _, r := range name {
		b.WriteString(literal(r))
	}
	b.WriteString(freeAfter)
	return b.String()
}

// escapedPattern finds a name in JSON, whichever of its characters are escaped, and in the text of
// a row, where quotes and backslashes are doubled.
func escapedPattern(name string) string {
	var b strings.Builder
	b.WriteString(`(?:` + freeBefore + `|` + escapeBefore + `)`)
	for _, r := range name {
		fmt.Fprintf(&b, `(?:%s|%s)`, written(r), coded(r))
	}
	b.WriteString(noLetterAfter + freeAfter)
	return b.String()
}

// literal is a regular expression that matches a character.
func literal(r rune) string {
	switch {
	case r > 0x7e || r == '_' || '0' <= r && r <= '9' || 'A' <= r && r <= 'Z' || 'a' <= r && r <= 'z':
		return string(r)
	case r < ' ':
		return fmt.Sprintf(`\u%04x`, r)
	}
	return `\` + string(r)
}

// written is a character as JSON or a row may have it, but for \u.
func written(r rune) string {
	switch r {
	case '"':
		return `\\*"+`
	case '\\':
		return `\\+`
	case '/':
		return `\\?/`
	case '\b':
		return `\\b`
	case '\f':
		return `\\f`
	case '\n':
		return `\\n`
	case '\r':
		return `\\r`
	case '\t':
		return `\\t`
	}
	return literal(r)
}

// coded is a character as \u and hexadecimal digits of either case.
func coded(r rune) string {
	units := []uint16{uint16(r)}
	if r > 0xffff {
		high, low := utf16.EncodeRune(r)
		units = []uint16{uint16(high), uint16(low)}
	}
	var b strings.Builder
	for _, u := range units {
		b.WriteString(`\\u`)
		for _, digit := range fmt.Sprintf("%04x", u) {
			if digit > '9' {
				fmt.Fprintf(&b, "[%c%c]", digit, digit-'a'+'A')
			} else {
				b.WriteRune(digit)
			}
		}
	}
	return b.String()
}
