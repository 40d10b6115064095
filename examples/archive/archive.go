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
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// archive writes the feed into a directory: a file of JSON lines for each day, named after it, and
// manifest.jsonl, with a line for each file that is closed. One process at a time may write it.
type archive struct {
	db     *pgxpool.Pool
	ledger *budget.Ledger
	dir    string

	closed []closedFile
	open   []openFile // the newest is written. Those before it are closed with the next page
}

// closedFile is a line of the manifest. The file does not change any more.
type closedFile struct {
	File   string `json:"file"`
	First  int64  `json:"first"` // the numbers of the feed that are in the file
	Last   int64  `json:"last"`
	SHA256 string `json:"sha256"`
}

type openFile struct {
	name        string
	first, last int64
	size        int64
}

const (
	consumer = "archive"
	manifest = "manifest.jsonl"
	byDay    = "2006-01-02.jsonl"
)

// run archives what is new, and closes files whose day the feed has passed. Run it each minute.
func (a *archive) run(ctx context.Context) error {
	err := a.ledger.RunFeed(ctx, a.db, consumer, budget.FeedOptions{Patience: 30 * 24 * time.Hour}, a.page)
	if err != nil {
		return err
	}
	return a.pass(ctx)
}

// page appends a page. The place in the feed moves with the transaction, once the file is on disk.
// If the process dies in between, the next run gets the page again, and cuts it off before it writes it.
func (a *archive) page(_ context.Context, _ pgx.Tx, entries []budget.FeedEntry) (err error) {
	if err := a.cut(entries[0].Number); err != nil {
		return err
	}
	if err := a.close(len(a.open) - 1); err != nil {
		return err
	}
	for len(entries) > 0 {
		name := a.file(entries[0])
		n := 1
		for n < len(entries) && max(name, entries[n].At.Format(byDay)) == name {
			n++
		}
		if err := a.append(name, entries[:n]); err != nil {
			return err
		}
		entries = entries[n:]
	}
	return nil
}

// file is the file of the next entry: that of its day, or the newest one, for an entry that
// got its number late. A closed one is not written again.
func (a *archive) file(e budget.FeedEntry) string {
	name := e.At.Format(byDay)
	if len(a.open) > 0 {
		return max(name, a.open[len(a.open)-1].name)
	}
	if len(a.closed) > 0 {
		day, _ := time.Parse(byDay, a.closed[len(a.closed)-1].File) // append gave it this name
		return max(name, day.AddDate(0, 0, 1).Format(byDay))
	}
	return name
}

func (a *archive) append(name string, entries []budget.FeedEntry) error {
	if len(a.open) == 0 || a.open[len(a.open)-1].name != name {
		a.open = append(a.open, openFile{name: name, first: entries[0].Number})
	}
	f, err := os.OpenFile(filepath.Join(a.dir, name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	n, err := write(f, entries)
	err = cmp.Or(err, f.Close(), syncDir(a.dir))
	newest := &a.open[len(a.open)-1]
	newest.last, newest.size = entries[len(entries)-1].Number, newest.size+n
	return err
}

// write writes entries as JSON lines, and has a writer that can Sync do so. It is all that an
// archive in another place needs: a reader drops a line whose Number is not above that of the line before.
func write(w io.Writer, entries []budget.FeedEntry) (int64, error) {
	var lines bytes.Buffer
	out := json.NewEncoder(&lines)
	for _, e := range entries {
		if err := out.Encode(e); err != nil {
			return 0, err
		}
	}
	n, err := lines.WriteTo(w)
	if f, can := w.(interface{ Sync() error }); can && err == nil {
		err = f.Sync()
	}
	return n, err
}

// cut takes lines off that were written, and whose transaction did not commit: those from number
// next on, which come again. It changes nothing if entries before next are missing.
func (a *archive) cut(next int64) error {
	text, err := os.ReadFile(filepath.Join(a.dir, manifest))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if n := len(a.open) - 1; n >= 0 && a.open[n].last == next-1 && bytes.Count(text, []byte("\n")) == len(a.closed) {
		info, err := os.Stat(filepath.Join(a.dir, a.open[n].name))
		if err == nil && info.Size() == a.open[n].size {
			return nil // as it was left
		}
	}
	a.closed, a.open = nil, nil
	last := int64(0)
	isClosed := make(map[string]bool)
	for line := range bytes.Lines(text) {
		var c closedFile
		if err := json.Unmarshal(line, &c); err != nil {
			return fmt.Errorf("%s: %w", manifest, err)
		}
		a.closed, isClosed[c.File], last = append(a.closed, c), true, c.Last
	}
	if last >= next {
		return fmt.Errorf("number %d is in a closed file: a server lost it, or the consumer began anew. Begin a new archive", next)
	}
	names, err := filepath.Glob(filepath.Join(a.dir, "[0-9]*.jsonl"))
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, path := range names {
		if isClosed[filepath.Base(path)] {
			continue
		}
		f, err := whole(path, last, next)
		if err != nil {
			return err
		}
		last = max(last, f.last)
		a.open = append(a.open, f)
	}
	if last != next-1 && last > 0 {
		return fmt.Errorf("the archive ends with number %d, and the feed goes on with %d. Begin a new archive", last, next)
	}
	for _, f := range a.open {
		path := filepath.Join(a.dir, f.name)
		if f.size == 0 {
			err = os.Remove(path)
		} else {
			err = os.Truncate(path, f.size)
		}
		if err != nil {
			return err
		}
	}
	a.open = slices.DeleteFunc(a.open, func(f openFile) bool { return f.size == 0 })
	return nil
}

// whole is the part of a file that has the numbers behind last, in whole lines, up to next.
func whole(path string, last, next int64) (openFile, error) {
	is := openFile{name: filepath.Base(path)}
	f, err := os.Open(path)
	if err != nil {
		return is, err
	}
	defer f.Close()
	for in := bufio.NewReader(f); ; {
		line, err := in.ReadBytes('\n')
		if err != nil && err != io.EOF {
			return is, err
		}
		var e struct{ Number int64 }
		if err == io.EOF || json.Unmarshal(line, &e) != nil || e.Number >= next || last > 0 && e.Number != last+1 {
			return is, nil
		}
		is.first, is.last, is.size = cmp.Or(is.first, e.Number), e.Number, is.size+int64(len(line))
		last = e.Number
	}
}

// pass closes the newest file, too, if all that was committed before the end of its day is in it.
// The consumer's row is locked meanwhile.
func (a *archive) pass(ctx context.Context) error {
	err := pgx.BeginFunc(ctx, a.db, func(tx pgx.Tx) error {
		more, err := a.ledger.ConsumeFeed(ctx, tx, consumer, budget.FeedOptions{Max: 1, Patience: 30 * 24 * time.Hour})
		if err != nil {
			return err
		}
		if len(more) > 0 {
			return errMore
		}
		all, err := a.ledger.FeedConsumers(ctx, tx)
		if err != nil {
			return err
		}
		is := all[slices.IndexFunc(all, func(c budget.FeedConsumer) bool { return c.Name == consumer })]
		if is.Consumed == 0 {
			return nil
		}
		if err := a.cut(is.Consumed + 1); err != nil {
			return err
		}
		n := len(a.open)
		if n > 0 && a.open[n-1].name >= is.NumberedTo.Format(byDay) {
			n--
		}
		return a.close(n)
	})
	if errors.Is(err, errMore) { // the next run gets it
		return nil
	}
	return err
}

var errMore = errors.New("there are new entries")

// close closes the oldest n open files.
func (a *archive) close(n int) error {
	for ; n > 0; n-- {
		is := a.open[0]
		f, err := os.Open(filepath.Join(a.dir, is.name))
		if err != nil {
			return err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		if err = cmp.Or(err, f.Close()); err != nil {
			return err
		}
		all := append(slices.Clone(a.closed), closedFile{is.name, is.first, is.last, fmt.Sprintf("%x", sum.Sum(nil))})
		if err := a.writeManifest(all); err != nil {
			return err
		}
		a.closed, a.open = all, a.open[1:]
	}
	return nil
}

// writeManifest writes the whole manifest, or leaves the one that is there.
func (a *archive) writeManifest(all []closedFile) error {
	next := filepath.Join(a.dir, "."+manifest)
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	out := json.NewEncoder(f)
	for _, c := range all {
		err = cmp.Or(err, out.Encode(c))
	}
	if err = cmp.Or(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return cmp.Or(os.Rename(next, filepath.Join(a.dir, manifest)), syncDir(a.dir))
}

// syncDir has the names of a directory's files on disk.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return cmp.Or(d.Sync(), d.Close())
}
