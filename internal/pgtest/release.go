package pgtest

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// released is the commit of 0.1.0, whose schema is version 1.
const released = "eec606f72a24ed038e0d3fb91697871516c1f119"

// Released returns the tree of the release before, in the user's cache: in the same directory each
// time, Go has compiled its packages. root is the clone. It skips the test where the clone does not
// have that commit.
func Released(t testing.TB, root string) (dir string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = t.TempDir()
	}
	dir = filepath.Join(cache, "metered-released", released)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	partial, err := os.MkdirTemp(filepath.Dir(dir), "partial-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(partial)
	archive := filepath.Join(t.TempDir(), "archive.tar")
	git := exec.CommandContext(t.Context(), "git", "archive", "--output", archive, released)
	git.Dir = root
	if out, err := git.CombinedOutput(); err != nil {
		t.Skipf("this clone has no commit of the release before: %s", out)
	}
	if out, err := exec.CommandContext(t.Context(), "tar", "-x", "-f", archive, "-C", partial).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Rename(partial, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another process may have been first
		t.Fatal(err)
	}
	return dir
}

// BuildProgram compiles a command of the module integration_test of a tree. files are in the
// command's directory besides, by their paths.
func BuildProgram(t testing.TB, tree, command string, files ...string) (program string) {
	t.Helper()
	dir := filepath.Join(tree, "integration_test")
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for _, file := range files {
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		overlay.Replace[filepath.Join(dir, command, filepath.Base(file))] = path
	}
	text, err := json.Marshal(overlay)
	scratch := t.TempDir()
	program = filepath.Join(scratch, filepath.Base(command))
	if err := errors.Join(err, os.WriteFile(filepath.Join(scratch, "overlay.json"), text, 0o600)); err != nil {
		t.Fatal(err)
	}
	compile := exec.CommandContext(t.Context(), "go", "build", "-overlay", filepath.Join(scratch, "overlay.json"), "-o", program, command)
	compile.Dir = dir
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}
