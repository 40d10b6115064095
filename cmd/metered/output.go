package main

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/term"
)

// print writes v as one line of JSON.
func (a *app) print(v any) error {
	out := json.NewEncoder(a.out)
	out.SetEscapeHTML(false)
	return out.Encode(v)
}

// table writes rows in columns, and nothing without rows.
type table struct {
	w    *tabwriter.Writer
	head []any
}

func (a *app) table(head ...any) *table { return newTable(a.out, head...) }

func newTable(w io.Writer, head ...any) *table {
	return &table{tabwriter.NewWriter(w, 0, 8, 2, ' ', 0), head}
}

func (t *table) row(cells ...any) {
	if t.head != nil {
		head := t.head
		t.head = nil
		t.row(head...)
	}
	for i, cell := range cells {
		text := shown(fmt.Sprint(cell))
		switch v := cell.(type) {
		case time.Time:
			text = instant(v)
		case time.Duration:
			text = lasting(v)
		}
		if i > 0 {
			text = "\t" + text
		}
		fmt.Fprint(t.w, text)
	}
	fmt.Fprintln(t.w)
}

func (t *table) flush() error { return t.w.Flush() }

// shown is a text of the database that cannot steer a terminal or tear a table.
func shown(text string) string {
	if strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return text
	}
	quoted := strconv.QuoteToGraphic(text)
	return quoted[1 : len(quoted)-1]
}

func instant(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("2006-01-02 15:04:05.000Z")
}

func lasting(d time.Duration) string {
	whole := ""
	if d >= 48*time.Hour {
		d = d.Round(time.Hour) // before the days are counted: 23h50m more are a day
		whole = fmt.Sprintf("%dd", d/(24*time.Hour))
		if d %= 24 * time.Hour; d == 0 {
			return whole
		}
	}
	if d >= time.Second {
		d = d.Round(time.Millisecond)
	}
	text := d.String()
	for _, zero := range []struct{ after, what string }{{"m", "0s"}, {"h", "0m"}} {
		if strings.HasSuffix(text, zero.after+zero.what) {
			text = strings.TrimSuffix(text, zero.what)
		}
	}
	return whole + text
}

// terminal reports whether w is one, and how large it is.
func terminal(w any) (width, height int, ok bool) {
	f, isFile := w.(interface{ Fd() uintptr })
	if !isFile || !term.IsTerminal(int(f.Fd())) {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return width, height, err == nil
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./:@%+,-]+$`)

// shellWord is a text as a shell takes it for one word.
func shellWord(text string) string {
	if plainWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
