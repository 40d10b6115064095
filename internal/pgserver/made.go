package pgserver

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
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

// keepMade copies a cluster that initdb just made, without the settings that were added. If that
// fails the next cluster is made anew.
func keepMade(made, data, conf string) {
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
