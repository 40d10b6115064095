package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// The names in an archive, as examples/archive has them.
const (
	archiveConsumer = "archive"
	archiveManifest = "manifest.jsonl"
	archiveBatch    = 500 // entries that are compared with the database at a time
)

// archiveReport has the findings of verify --archive.
type archiveReport struct {
	OK         bool               `json:"ok"`
	Files      int                `json:"files"`
	Closed     int                `json:"closed"` // of the files, those with a checksum
	Entries    int64              `json:"entries"`
	First      int64              `json:"first"` // the first number
	Last       int64              `json:"last"`
	Repeated   int64              `json:"repeated,omitempty"`   // lines that say an entry again
	Anew       int64              `json:"anew,omitempty"`       // scopes that began again
	Unfinished int64              `json:"unfinished,omitempty"` // lines that end without a newline
	Compared   int64              `json:"compared,omitempty"`   // entries that the database has, too
	Gone       int64              `json:"gone,omitempty"`       // entries that it has no longer
	Difference *archiveDifference `json:"difference,omitempty"`
}

// archiveDifference is the first thing that is wrong in an archive. It is an error, so that it ends
// the check.
type archiveDifference struct {
	File   string `json:"file"`
	Line   int    `json:"line,omitempty"` // 0: the whole file
	Number int64  `json:"number,omitempty"`
	Scope  string `json:"scope,omitempty"`
	Seq    int64  `json:"seq,omitempty"`
	Field  string `json:"field"`
	Got    string `json:"got"`
	Want   string `json:"want"`
}

func (d *archiveDifference) Error() string {
	return fmt.Sprintf("%s: %s is %s, want %s", d.File, d.Field, d.Got, d.Want)
}

// archiveFile is a line of the manifest: a file that is closed.
type archiveFile struct {
	File   string `json:"file"`
	First  int64  `json:"first"`
	Last   int64  `json:"last"`
	SHA256 string `json:"sha256"`
}

// archiveReader checks an archive from its first line to its last one.
type archiveReader struct {
	dir    string
	ledger *budget.Ledger
	pool   *pgxpool.Pool // nil: the entries are not compared

	tips   map[string]budget.Entry // the last entry of each scope
	batch  []archiveLine           // not compared yet
	report archiveReport

	file string
	line int
	last budget.FeedCursor
}

type archiveLine struct {
	file   string
	line   int
	before budget.FeedCursor // the place before it
	budget.FeedEntry
}

// verifyArchive checks the archive in a directory, against a database unless pool is nil.
func (a *app) verifyArchive(ctx context.Context, dir string, pool *pgxpool.Pool) error {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	r := &archiveReader{dir: dir, ledger: ledger, pool: pool, tips: make(map[string]budget.Entry)}
	if err := r.check(ctx); err != nil && !errors.As(err, &r.report.Difference) {
		return err
	}
	r.report.OK = r.report.Difference == nil
	if a.json {
		err = a.print(r.report)
	} else {
		err = a.archiveVerified(r.report)
	}
	if !r.report.OK {
		return cmp.Or(err, error(found(exitDifferences)))
	}
	return err
}

func (a *app) archiveVerified(r archiveReport) error {
	t := a.table("FILE", "LINE", "NUMBER", "SCOPE", "ENTRY", "FIELD", "IS", "WANT")
	if d := r.Difference; d != nil {
		t.row(d.File, d.Line, d.Number, dash(d.Scope), d.Seq, d.Field, d.Got, d.Want)
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s of numbers %d to %d, in %s, of which %d closed.\n",
		plural(int(r.Entries), "entry", "entries"), r.First, r.Last,
		plural(r.Files, "file", "files"), r.Closed)
	for _, also := range []struct {
		n               int64
		one, many, what string
	}{{r.Compared, "entry", "entries", "compared with the database"},
		{r.Gone, "entry", "entries", "no longer in the database"},
		{r.Anew, "scope", "scopes", "began again, after a purge or under an alias"},
		{r.Repeated, "line", "lines", "repeated"}, {r.Unfinished, "line", "lines", "unfinished"}} {
		if also.n > 0 {
			fmt.Fprintf(a.out, "%s %s.\n", plural(int(also.n), also.one, also.many), also.what)
		}
	}
	end := "No difference."
	if !r.OK {
		end = "It stopped at the first difference."
	}
	fmt.Fprintln(a.out, end)
	return nil
}

func (r *archiveReader) differs(e budget.FeedEntry, field string, got, want any) error {
	return &archiveDifference{r.file, r.line, e.Number, e.Scope, e.Seq, field, fmt.Sprint(got),
		fmt.Sprint(want)}
}

func (r *archiveReader) check(ctx context.Context) error {
	consumed := int64(0)
	if r.pool != nil { // before the files are read: they have at least what is consumed now
		all, err := r.ledger.FeedConsumers(ctx, r.pool)
		if err != nil {
			return err
		}
		for _, c := range all {
			if c.Name == archiveConsumer {
				consumed = c.Consumed
			}
		}
	}
	closed, names, err := r.files()
	for i := 0; err == nil && i < len(names); i++ {
		err = r.read(ctx, names[i], closed[names[i]])
	}
	if err == nil {
		err = r.compare(ctx)
	}
	if err != nil {
		return err
	}
	if r.report.Last < consumed {
		r.line = 0
		return r.differs(budget.FeedEntry{}, "last number", r.report.Last,
			fmt.Sprintf("%d, which is consumed", consumed))
	}
	return nil
}

// files are the closed files, and the names of all that are there or should be.
func (r *archiveReader) files() (closed map[string]*archiveFile, names []string, err error) {
	closed = make(map[string]*archiveFile)
	r.file = archiveManifest
	text, err := os.ReadFile(filepath.Join(r.dir, archiveManifest))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, usagef("--archive: %v", err)
	}
	for line := range bytes.Lines(text) {
		r.line++
		c := &archiveFile{}
		if json.Unmarshal(line, c) != nil || c.File != filepath.Base(c.File) {
			return nil, nil, r.differs(budget.FeedEntry{}, "line", string(line), "a closed file")
		}
		closed[c.File], names = c, append(names, c.File)
	}
	there, err := fs.Glob(os.DirFS(r.dir), "[0-9]*.jsonl")
	names = append(names, there...)
	slices.Sort(names)
	if len(names) == 0 {
		return nil, nil, usagef("--archive: %s has no file of an archive", r.dir)
	}
	return closed, slices.Compact(names), err
}

// read reads a file, which is still open if closed is nil.
func (r *archiveReader) read(ctx context.Context, name string, closed *archiveFile) error {
	r.file, r.line = name, 0
	f, err := os.Open(filepath.Join(r.dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return r.differs(budget.FeedEntry{}, "file", "missing", "there")
	}
	if err != nil {
		return err
	}
	defer f.Close()
	r.report.Files++
	sum := sha256.New()
	in := bufio.NewReader(io.TeeReader(f, sum))
	line, err := in.ReadBytes('\n')
	for ; err == nil; line, err = in.ReadBytes('\n') {
		r.line++
		if err := r.entry(ctx, line); err != nil {
			return err
		}
	}
	if err != io.EOF {
		return err
	}
	if closed == nil {
		if len(line) > 0 { // the writer died there, or is at it
			r.report.Unfinished++
		}
		return nil
	}
	r.report.Closed++
	r.line = 0
	if r.report.Last != closed.Last {
		return r.differs(budget.FeedEntry{}, "last number", r.report.Last, closed.Last)
	}
	if got := fmt.Sprintf("%x", sum.Sum(nil)); got != closed.SHA256 {
		return r.differs(budget.FeedEntry{}, "sha256", got, closed.SHA256)
	}
	return nil
}

// entry checks a line against those before it.
func (r *archiveReader) entry(ctx context.Context, line []byte) error {
	var e budget.FeedEntry
	if err := json.Unmarshal(line, &e); err != nil || e.Number < 1 || e.Scope == "" {
		return r.differs(e, "line", fmt.Sprintf("%.40q", line), "an entry")
	}
	if e.Number <= r.report.Last { // it was written, and not consumed: it came again
		r.report.Repeated++
		return nil
	}
	if r.report.Last > 0 && e.Number != r.report.Last+1 {
		return r.differs(e, "number", e.Number, r.report.Last+1)
	}
	if err := r.chain(e); err != nil {
		return err
	}
	r.report.First, r.report.Last = cmp.Or(r.report.First, e.Number), e.Number
	r.report.Entries++
	r.tips[e.Scope] = e.Entry
	if r.pool != nil {
		r.batch = append(r.batch, archiveLine{r.file, r.line, r.last, e})
	}
	r.last = e.Cursor
	if len(r.batch) < archiveBatch {
		return nil
	}
	return r.compare(ctx)
}

// chain checks that an entry follows from the one before it in its scope. The first one of a scope
// that began before the archive has none.
func (r *archiveReader) chain(e budget.FeedEntry) error {
	prev, has := r.tips[e.Scope]
	switch {
	case !has && e.Seq != 1:
		return nil
	case has && e.Seq == 1: // a purge forgot the scope, or its name was taken out, and it began anew
		r.report.Anew++
		prev = budget.Entry{}
	}
	if e.Seq != prev.Seq+1 {
		return r.differs(e, "seq", e.Seq, prev.Seq+1)
	}
	var spent, refunded, credited, held, epoch int64
	switch e.Kind {
	case budget.EntryCharge:
		spent = e.Amount
	case budget.EntryCredit:
		credited = e.Amount
	case budget.EntryLapse, budget.EntryRevoke, budget.EntryRollOver:
		credited = -e.Amount
	case budget.EntryRefund:
		refunded = e.Amount
	case budget.EntryHold:
		held = e.Amount
	case budget.EntryCapture:
		spent, held = e.Amount, -e.Amount
	case budget.EntryRelease, budget.EntryExpire:
		held = -e.Amount
	case budget.EntryClockRepair:
		epoch = 1
	case budget.EntryClose, budget.EntrySchedule:
	default:
		return r.differs(e, "kind", e.Kind, "a known kind")
	}
	for _, sum := range []struct {
		field            string
		got, before, add int64
	}{{"spent", e.Spent, prev.Spent, spent}, {"refunded", e.Refunded, prev.Refunded, refunded},
		{"credited", e.Credited, prev.Credited, credited}, {"held", e.Held, prev.Held, held},
		{"epoch", int64(e.Epoch), int64(prev.Epoch), epoch}} {
		if sum.got != sum.before+sum.add {
			return r.differs(e, sum.field, sum.got,
				fmt.Sprintf("%d, after %d and amount %d", sum.before+sum.add, sum.before, e.Amount))
		}
	}
	return nil
}

// compare compares the entries of a batch with those that the database still has.
func (r *archiveReader) compare(ctx context.Context) error {
	first := make(map[string]int64)
	for _, e := range r.batch {
		first[e.Scope] = cmp.Or(first[e.Scope], e.Seq)
	}
	there := make(map[string]map[int64]budget.Entry, len(first)) // by scope and seq
	for scope, from := range first {
		there[scope] = make(map[int64]budget.Entry)
		opts := budget.EntriesOptions{After: from - 1, Before: r.tips[scope].Seq + 1}
		for e, err := range r.ledger.Entries(ctx, r.pool, scope, opts) {
			if err != nil {
				return err
			}
			there[scope][e.Seq] = e
		}
	}
	for _, e := range r.batch {
		is, has := there[e.Scope][e.Seq]
		field, got, want, err := unequal(e.Entry, is)
		if err == nil && has && field != "" {
			has, err = r.is(ctx, e, is)
		}
		switch {
		case err != nil:
			return err
		case !has:
			r.report.Gone++
		case field != "":
			r.file, r.line = e.file, e.line
			return r.differs(e.FeedEntry, field, got, want+" in the database")
		default:
			r.report.Compared++
		}
	}
	r.batch = r.batch[:0]
	return nil
}

// is reports whether an entry of the database is the one that the archive has by the same scope and
// seq, though they differ. Else the archive's is gone, and its scope began again: the number of the
// entry says so, or, where the feed was purged, its time.
func (r *archiveReader) is(ctx context.Context, e archiveLine, is budget.Entry) (bool, error) {
	same := !is.At.After(e.At)
	err := readOnly(ctx, r.pool, func(tx pgx.Tx) error {
		for f, err := range r.ledger.Feed(ctx, tx, e.before, budget.FeedOptions{Max: 1}) {
			if err != nil && !errors.Is(err, budget.ErrFeedGap) {
				return err
			}
			if f.Number == e.Number { // not of a gap
				same = f.Scope == e.Scope && f.Seq == e.Seq
			}
		}
		return nil
	})
	return same, err
}

// unequal is the first field of two entries that is not the same in JSON, or "".
func unequal(got, want budget.Entry) (field, is, other string, err error) {
	a, b := reflect.ValueOf(got), reflect.ValueOf(want)
	for i := range a.NumField() {
		one, err := json.Marshal(a.Field(i).Interface())
		two, failed := json.Marshal(b.Field(i).Interface())
		if err = cmp.Or(err, failed); err != nil || !bytes.Equal(one, two) {
			field, _, _ = strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			return field, string(one), string(two), err
		}
	}
	return "", "", "", nil
}
