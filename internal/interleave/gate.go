package interleave

import (
	"fmt"
	"regexp"
	"strings"
)

// gateCall is the statement that stands before a gated one, with the gate's place.
const gateCall = "perform gates.pass('%s'); "

var (
	gateCalls = regexp.MustCompile(`perform gates\.pass\('[a-z0-9_]+:\d+'\); `)
	function  = regexp.MustCompile(`(?s)create function ([a-z_]+\.)?([a-z0-9_]+)\(.*?\n(?:as |as\n)?\$\$\n?`)
	language  = regexp.MustCompile(`(?m)^language (\w+)`)
)

// Gated puts a gate before each statement of a PL/pgSQL function that reads or writes what other
// sessions see: shared matches the text of such a statement. A statement that only calls another
// PL/pgSQL function needs none, since that function has its own. Functions in SQL are inlined, or
// run inside a statement, and get none: shared must match their names. The rest of the script stays
// as it is.
func Gated(script string, shared *regexp.Regexp) string {
	var out strings.Builder
	for {
		at := function.FindStringSubmatchIndex(script)
		if at == nil {
			out.WriteString(script)
			return out.String()
		}
		head, name := script[:at[1]], script[at[4]:at[5]]
		body, rest, _ := strings.Cut(script[at[1]:], "$$")
		if lang := language.FindStringSubmatch(script[at[0]:at[1]]); lang != nil && lang[1] == "plpgsql" {
			body = gatedBody(name, body, shared)
		}
		out.WriteString(head + body + "$$")
		script = rest
	}
}

// Ungated takes the gates out of a script again.
func Ungated(script string) string { return gateCalls.ReplaceAllString(script, "") }

// Places are the gates of a script.
func Places(script string) []string {
	var all []string
	for _, call := range gateCalls.FindAllString(script, -1) {
		all = append(all, strings.Split(call, "'")[1])
	}
	return all
}

// gatedBody scans the body of a function in PL/pgSQL. It knows where statements begin, and skips
// expressions.
func gatedBody(name, body string, shared *regexp.Regexp) string {
	var (
		out      strings.Builder
		toks     = tokens(body)
		i, gates int
		written  int
	)
	// until moves past the next token that is one of ends, outside of parentheses and CASE
	// expressions.
	until := func(ends ...string) {
		depth, cases := 0, 0
		for ; i < len(toks); i++ {
			word := toks[i].word
			switch {
			case word == "(" || word == "[":
				depth++
			case word == ")" || word == "]":
				depth--
			case word == "case":
				cases++
			case word == "end" && cases > 0:
				cases--
			case depth == 0 && cases == 0:
				for _, end := range ends {
					if word == end {
						i++
						return
					}
				}
			}
		}
	}
	gate := func(from int) {
		last := len(body)
		if i < len(toks) {
			last = toks[i].at
		}
		if shared.MatchString(withoutComments(body[toks[from].at:last])) {
			out.WriteString(body[written:toks[from].at])
			gates++
			fmt.Fprintf(&out, gateCall, fmt.Sprintf("%s:%d", name, gates))
			written = toks[from].at
		}
	}
	declaring := len(toks) > 0 && toks[0].word == "declare"
	for i < len(toks) {
		from := i
		switch word := toks[i].word; word {
		case "declare":
			declaring = true
			i++
		case "begin":
			declaring = false
			i++
		case "else", "loop", "exception":
			i++
		case "when":
			until("then")
		case "elsif": // no statement can stand before it: the gate of its IF stands for it
			until("then")
		case "end":
			until(";")
		case "if":
			until("then")
			gate(from)
		case "for", "while", "foreach":
			until("loop")
			gate(from)
		default:
			until(";")
			if !declaring {
				gate(from)
			}
		}
	}
	out.WriteString(body[written:])
	return out.String()
}

// token is a word, a sign or a string of SQL.
type token struct {
	word string
	at   int
}

var tokenText = regexp.MustCompile(`--[^\n]*|'(?:[^']|'')*'|"[^"]*"|[a-zA-Z_][a-zA-Z0-9_.]*|\S`)

func tokens(body string) []token {
	var all []token
	for _, at := range tokenText.FindAllStringIndex(body, -1) {
		if word := body[at[0]:at[1]]; !strings.HasPrefix(word, "--") {
			all = append(all, token{strings.ToLower(word), at[0]})
		}
	}
	return all
}

var comment = regexp.MustCompile(`--[^\n]*`)

func withoutComments(text string) string { return comment.ReplaceAllString(text, "") }
