package guardtx

import "strings"

// controlsTransaction reports whether sql contains a statement that begins or ends a transaction,
// or closes the cursor that guards it. Savepoints are allowed: they stay inside it. With
// backslashes set, a backslash is special in plain literals, as it was before
// standard_conforming_strings.
//
// It also reports a text that leaves a quote or a comment open. Alone that is a syntax error, but
// in a batch of the simple protocol it swallows the beginning of the next text, and changes its
// meaning.
//
// The server also refuses COMMIT, in any form (see block_commit in schema.sql). It cannot refuse
// ROLLBACK, and later statements would be committed on their own. So the text is checked before it
// is sent. A doubtful text is refused, such as an SQL-standard function body, whose END looks like
// a COMMIT.
func controlsTransaction(sql string, backslashes bool) bool {
	for len(sql) > 0 {
		words, rest, open := statement(sql, backslashes)
		if open {
			return true
		}
		sql = rest
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
		case "close":
			switch strings.Trim(words[1], `"`) {
			case "all", "metered_command", "metered_write":
				return true
			}
		}
	}
	return false
}

// statement returns the first three words of sql's first statement, in lower case, the text after
// its semicolon, and whether a quote or a comment is left open. The functions that skip those
// return their end, or else a place after the end of sql.
func statement(sql string, backslashes bool) (words [3]string, rest string, open bool) {
	n := 0
	word := func(w string) {
		if n < len(words) {
			words[n] = w
			n++
		}
	}
	i := 0
	for i < len(sql) {
		from := i
		switch c := sql[i]; {
		case c == ';':
			return words, sql[i+1:], false
		case isSpace(c):
			i++
		case strings.HasPrefix(sql[i:], "--"):
			i = afterLine(sql, i)
		case strings.HasPrefix(sql[i:], "/*"):
			i = afterComment(sql, i)
		case c == '\'':
			i = afterLiteral(sql, i, backslashes)
			n = len(words)
		case c == '"':
			i = afterQuoted(sql, i, false)
			word(sql[from:min(i, len(sql))]) // with its quotes: a name is never a keyword
		case c == '$':
			i = afterDollar(sql, i)
			n = len(words)
		case isDigit(c): // not a word: in 1$$ a literal begins
			for i < len(sql) && isWord(sql[i]) {
				i++
			}
			n = len(words)
		case isWord(c):
			for i < len(sql) && (isWord(sql[i]) || sql[i] == '$') {
				i++
			}
			word(strings.ToLower(sql[from:i]))
			// E'…' knows backslashes. The prefix is part of the literal.
			if i < len(sql) && sql[i] == '\'' && i == from+1 && (c == 'e' || c == 'E') {
				i = afterLiteral(sql, i, true)
			}
		default:
			i++
			n = len(words) // an operator or a parenthesis: no control statement goes on after it
		}
	}
	return words, "", i > len(sql)
}

func isSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isWord(c byte) bool {
	return c == '_' || isDigit(c) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

// afterLine skips a comment to the end of its line.
func afterLine(sql string, from int) int {
	if i := strings.IndexAny(sql[from:], "\r\n"); i >= 0 {
		return from + i + 1
	}
	return len(sql)
}

// afterComment skips a block comment. Comments nest.
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
	return len(sql) + 1
}

// afterQuoted skips a literal or a quoted name. It takes a doubled quote for an end and a new
// beginning, which comes out the same.
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
	return len(sql) + 1
}

// afterLiteral skips a literal and the parts that continue it, at once or on another line. The
// first part decides about backslashes in all of them.
func afterLiteral(sql string, from int, backslashes bool) int {
	for {
		end := afterQuoted(sql, from, backslashes)
		next, lines := end, false
		for next < len(sql) && (isSpace(sql[next]) || strings.HasPrefix(sql[next:], "--")) {
			if sql[next] == '-' {
				next = afterLine(sql, next)
				lines = true
				continue
			}
			lines = lines || sql[next] == '\n' || sql[next] == '\r'
			next++
		}
		if next >= len(sql) || sql[next] != '\'' || next > end && !lines {
			return end
		}
		from = next
	}
}

// afterDollar skips $tag$ … $tag$, or a parameter, or just the dollar.
func afterDollar(sql string, from int) int {
	end := from + 1
	if end < len(sql) && isDigit(sql[end]) {
		for end < len(sql) && isDigit(sql[end]) {
			end++
		}
		return end
	}
	for end < len(sql) && isWord(sql[end]) {
		end++
	}
	if end == len(sql) || sql[end] != '$' {
		return from + 1
	}
	tag := sql[from : end+1]
	if i := strings.Index(sql[end+1:], tag); i >= 0 {
		return end + 1 + i + len(tag)
	}
	return len(sql) + 1
}
