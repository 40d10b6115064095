package ledger

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Composites are sent as text: pgx knows a type of the schema only on connections that registered
// it, and connections are the caller's.

// composite is the text form of a row. Its fields are numbers, quoted text, or "" for null.
func composite(fields ...string) string { return "(" + strings.Join(fields, ",") + ")" }

// Array is the text form of an array of rows or texts.
func array(elements []string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, e := range elements {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		escapeInArray.WriteString(&b, e)
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

var (
	escapeInArray = strings.NewReplacer(`"`, `\"`, `\`, `\\`)
	escapeInRow   = strings.NewReplacer(`"`, `""`, `\`, `\\`)
)

// text is a field of text, or of any other type in its text form.
func text(s string) string { return `"` + escapeInRow.Replace(s) + `"` }

// textOrNull is null for "".
func textOrNull(s string) string {
	if s == "" {
		return ""
	}
	return text(s)
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

// numberOrNull is a number, or null for nil.
func numberOrNull(n *int64) string {
	if n == nil {
		return ""
	}
	return number(*n)
}

// numbersOrNull is an array of numbers, or null for none.
func numbersOrNull(of []int64) string {
	if len(of) == 0 {
		return ""
	}
	all := make([]string, len(of))
	for i, n := range of {
		all[i] = number(n)
	}
	return text("{" + strings.Join(all, ",") + "}")
}

func boolean(b bool) string { return strconv.FormatBool(b) }

func bytes(b []byte) string {
	if b == nil {
		return ""
	}
	return text(`\x` + hex.EncodeToString(b))
}

// interval does not use one large field, which Postgres 14 bounds by 32 bits.
func interval(d time.Duration) string {
	us := d.Microseconds()
	return fmt.Sprintf("%d:%02d:%02d.%06d", us/3_600_000_000, us/60_000_000%60, us/1_000_000%60, us%1_000_000)
}

func moment(t *time.Time) string {
	if t == nil {
		return ""
	}
	return text(timestamp(*t))
}

// timestamp is read the same under any DateStyle.
func timestamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.999999+00") }
