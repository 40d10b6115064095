package pgserver

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// madeDir returns the place for the cluster that initdb of these binaries makes, or "". A copy of
// it takes a tenth of initdb's time. A cluster with a password is not kept: it gets its own one in
// a copy of one without.
func madeDir(cache string, in installation, as account) string {
	hash := sha256.New()
	_, _ = hash.Write([]byte(watchdogScript)) // has initdb's arguments
	for _, name := range []string{"initdb", "postgres"} {
		program, err := os.ReadFile(filepath.Join(in.dir, name))
		if err != nil {
			return ""
		}
		_, _ = hash.Write(program)
	}
	cache, err := (&download{cache: cache}).cacheDir(as)
	if err != nil {
		return ""
	}
	return filepath.Join(cache, fmt.Sprintf("initdb-%x", hash.Sum(nil)[:8]))
}

// isKept is the place if a cluster is kept there, or "". It notes the use.
func isKept(made string) string {
	if _, err := os.Stat(made); err != nil {
		return ""
	}
	_ = os.Chtimes(made, time.Time{}, time.Now())
	return made
}

// mostPrepared is how many prepared clusters are kept for one that initdb made: each new name, such
// as that of another schema, adds one.
const mostPrepared = 4

// dropPrepared drops the prepared clusters that were not used for the longest time.
func dropPrepared(kept string) error {
	all, err := filepath.Glob(kept[:strings.LastIndexByte(kept, '-')] + "-*")
	used := map[string]time.Time{}
	for _, made := range all {
		if info, err := os.Stat(made); err == nil { // or another process dropped it
			used[made] = info.ModTime()
		}
	}
	all = slices.SortedFunc(maps.Keys(used), func(a, b string) int { return used[b].Compare(used[a]) })
	for _, made := range all[min(len(all), mostPrepared):] {
		err = errors.Join(err, discardMade(made))
	}
	return err
}

// keepMade copies a cluster that initdb just made or that was prepared, without the settings that
// were added. If that fails the next cluster is made anew.
func keepMade(made, data, conf string) {
	if made == "" {
		return
	}
	partial, err := os.MkdirTemp(filepath.Dir(made), "partial-")
	if err != nil {
		return
	}
	defer os.RemoveAll(partial)
	settings, err := os.ReadFile(filepath.Join(data, "postgresql.conf"))
	if err != nil || os.CopyFS(partial, os.DirFS(data)) != nil {
		return
	}
	if err := filepath.WalkDir(partial, func(path string, _ fs.DirEntry, err error) error { // for the account, whatever this one's umask is
		return cmp.Or(err, os.Chmod(path, 0o755))
	}); err != nil {
		return
	}
	if os.WriteFile(filepath.Join(partial, "postgresql.conf"), []byte(strings.TrimSuffix(string(settings), conf+"\n")), 0o644) == nil {
		_ = os.Rename(partial, made) // another process may have been first
	}
}

// discardMade removes a kept cluster. A copy of it that another process is making fails at once,
// and is not one of a part.
func discardMade(made string) error {
	trash, err := os.MkdirTemp(filepath.Dir(made), "partial-")
	if err != nil {
		return err
	}
	if err := os.Rename(made, filepath.Join(trash, "made")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(err, os.RemoveAll(trash))
	}
	return os.RemoveAll(trash)
}
