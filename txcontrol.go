package metered

import "strings"

// controlsTransaction reports whether sql contains a statement that begins or
// ends a transaction. Savepoints are allowed: they stay inside it.
//
// COMMIT is refused by the server too, whatever way it comes (see unfinished in
// schema.sql). ROLLBACK cannot be, and what followed it would be committed on its
// own; so the text is looked at before it is sent.
func controlsTransaction(sql string) bool {
	for len(sql) > 0 {
		var words [3]string
		words, sql = statement(sql)
		switch words[0] {
		case "begin", "start", "commit", "end", "abort":
			return true
		case "rollback":
			// ROLLBACK [WORK|TRANSACTION] TO [SAVEPOINT] name
			if words[1] != "to" && words[2] != "to" {
				return true
			}
		case "prepare":
			if words[1] == "transaction" {
				return true
			}
		}
	}
	return false
}

// statement returns the first three words of sql's first statement, in lower
// case, and what comes after its semicolon.
func statement(sql string) (words [3]string, rest string) {
	n := 0
	for i := 0; i < len(sql); {
		switch c := sql[i]; {
		case c == ';':
			return words, sql[i+1:]
		case isSpace(c):
			i++
		case strings.HasPrefix(sql[i:], "--"):
			i = after(sql, i, "\n")
		case strings.HasPrefix(sql[i:], "/*"):
			i = afterComment(sql, i)
		case c == '\'':
			i = afterQuoted(sql, i, false)
		case c == '"':
			i = afterQuoted(sql, i, false)
		case c == '$':
			i = afterDollar(sql, i)
		case isWord(c):
			end := i
			for end < len(sql) && (isWord(sql[end]) || sql[end] == '$') {
				end++
			}
			if n < len(words) {
				words[n] = strings.ToLower(sql[i:end])
				n++
			}
			// E'…' knows backslashes; the prefix is part of the literal.
			if end < len(sql) && sql[end] == '\'' && end == i+1 && (c == 'e' || c == 'E') {
				end = afterQuoted(sql, end, true)
			}
			i = end
		default:
			i++
			n = len(words) // an operator or a parenthesis: no control statement goes on after it
		}
	}
	return words, ""
}

func isSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

func isWord(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

// after returns the index behind the next mark at or after from.
func after(sql string, from int, mark string) int {
	if i := strings.Index(sql[from:], mark); i >= 0 {
		return from + i + len(mark)
	}
	return len(sql)
}

// afterComment skips a block comment; they nest.
func afterComment(sql string, from int) int {
	depth := 0
	for i := from; i < len(sql); {
		switch {
		case strings.HasPrefix(sql[i:], "/*"):
			depth++
			i += 2
		case strings.HasPrefix(sql[i:], "*/"):
			depth--
			i += 2
			if depth == 0 {
				return i
			}
		default:
			i++
		}
	}
	return len(sql)
}

// afterQuoted skips a literal or a quoted name; a doubled quote is the next part
// of it, which comes out the same as two literals side by side.
func afterQuoted(sql string, from int, backslashes bool) int {
	quote := sql[from]
	for i := from + 1; i < len(sql); i++ {
		switch {
		case sql[i] == quote:
			return i + 1
		case backslashes && sql[i] == '\\':
			i++
		}
	}
	return len(sql)
}

// afterDollar skips $tag$ … $tag$, or just the dollar of a parameter.
func afterDollar(sql string, from int) int {
	end := from + 1
	for end < len(sql) && isWord(sql[end]) {
		end++
	}
	if end == len(sql) || sql[end] != '$' || end > from+1 && sql[from+1] >= '0' && sql[from+1] <= '9' {
		return from + 1
	}
	tag := sql[from : end+1]
	return after(sql, end+1, tag)
}
