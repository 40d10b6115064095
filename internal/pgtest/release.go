package pgtest

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// released is the commit of 0.1.0, whose schema is version 1.
const released = "eec606f72a24ed038e0d3fb91697871516c1f119"

// Released writes the tree of the release before to a directory. root is the clone. It skips the test where the clone does not have that commit.
func Released(t testing.TB, root string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	archive := filepath.Join(dir, "archive.tar")
	git := exec.CommandContext(t.Context(), "git", "archive", "--output", archive, released)
	git.Dir = root
	if out, err := git.CombinedOutput(); err != nil {
		t.Skipf("this clone has no commit of the release before: %s", out)
	}
	if out, err := exec.CommandContext(t.Context(), "tar", "-x", "-f", archive, "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// BuildProgram compiles a command of the module integration_test of a tree.
func BuildProgram(t testing.TB, tree, command string) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), filepath.Base(command))
	compile := exec.CommandContext(t.Context(), "go", "build", "-o", program, command)
	compile.Dir = filepath.Join(tree, "integration_test")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}
