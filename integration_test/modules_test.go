package integration_test

import (
	"archive/zip"
	"bytes"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

const core = "github.com/pgmetered/metered"

// proxy serves the modules of this repository as the module proxy does: any commit of it by its pseudo-version, and main, which is the last
// commit here. It knows no tag.
type proxy struct {
	*testing.T
	mu    sync.Mutex
	trees map[string]string // directories by commit
}

func (p *proxy) git(args ...string) (string, error) {
	cmd := exec.CommandContext(p.Context(), "git", append([]string{"-C", ".."}, args...)...)
	cmd.Env = append(os.Environ(), "TZ=UTC")
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}

// version is the pseudo-version of a commit.
func (p *proxy) version(commit string) (string, error) {
	return p.git("show", "-s", "--abbrev=12", "--date=format-local:%Y%m%d%H%M%S", "--format=v0.0.0-%cd-%h", commit)
}

// tree is a directory with the files of a commit.
func (p *proxy) tree(commit string) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if dir, known := p.trees[commit]; known {
		return dir, nil
	}
	archive, err := exec.CommandContext(p.Context(), "git", "-C", "..", "archive", commit).Output()
	if err != nil {
		return "", err
	}
	dir := p.TempDir()
	unpack := exec.CommandContext(p.Context(), "tar", "-x", "-C", dir)
	unpack.Stdin = bytes.NewReader(archive)
	if out, err := unpack.CombinedOutput(); err != nil {
		return "", fmt.Errorf("tar: %w: %s", err, out)
	}
	p.trees[commit] = dir
	return dir, nil
}

var pseudo = regexp.MustCompile(`^v0\.0\.0-\d{14}-([0-9a-f]{12})$`)

// answer is a file of the proxy, whose path names a module of ours: MODULE/@v/VERSION.zip.
func (p *proxy) answer(path string) ([]byte, error) {
	if module, latest := strings.CutSuffix(path, "/@latest"); latest {
		path = module + "/@v/main.info"
	}
	module, file, _ := strings.Cut(path, "/@v/")
	if file == "list" {
		return nil, nil // no tags
	}
	asked := strings.TrimSuffix(file, filepath.Ext(file))
	commit := "HEAD"
	if m := pseudo.FindStringSubmatch(asked); m != nil {
		commit = m[1]
	} else if asked != "main" {
		return nil, fmt.Errorf("no tag %s", asked)
	}
	version, err := p.version(commit)
	if err != nil || asked != "main" && version != asked {
		return nil, fmt.Errorf("the commit of %s has the version %s: %w", asked, version, err)
	}
	dir, err := p.tree(commit)
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(dir, filepath.FromSlash(strings.TrimPrefix(module, core)))
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		return nil, err // a directory that is no module
	}
	switch filepath.Ext(file) {
	case ".info":
		at, err := p.git("show", "-s", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", "--format=%cd", commit)
		return fmt.Appendf(nil, `{"Version":%q,"Time":%q}`, version, at), err
	case ".mod":
		return mod, nil
	}
	return zipped(module+"@"+version, dir)
}

// zipped is a module's directory as a proxy has it.
func zipped(prefix, dir string) ([]byte, error) {
	var file bytes.Buffer
	archive := zip.NewWriter(&file)
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules" {
				return fs.SkipDir // it is another module, or no package
			}
			return nil
		}
		name, err := filepath.Rel(dir, path)
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		w, err := archive.Create(prefix + "/" + filepath.ToSlash(name))
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	}); err != nil {
		return nil, err
	}
	err := archive.Close()
	return file.Bytes(), err
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/")
	if module, _, _ := strings.Cut(path, "/@"); module != core && !strings.HasPrefix(module, core+"/") {
		http.NotFound(w, r)
		return
	}
	answer, err := p.answer(path)
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	_, _ = w.Write(answer)
}

// The versions that the modules require of each other are those of a commit before this one, in all modules and in go.work.
func TestModules_RequireACommitThatIsThere(t *testing.T) {
	t.Parallel()
	p := &proxy{T: t}
	if shallow, err := p.git("rev-parse", "--is-shallow-repository"); err != nil || shallow == "true" {
		t.Skip("a whole clone has the commits that the modules name")
	}
	out, err := exec.CommandContext(t.Context(), "../.ci/tidy", "-check").CombinedOutput()
	require.NoError(t, err, "run .ci/tidy: %s", out)
}

// names are a name of each module, which a consumer uses.
var names = map[string]string{"": "Do[any]", "/budget/feedjobs": "NewWorker", "/cells": "New", "/console": "New", "/jobs/citusjobs": "New", "/leases/carvejobs": "New", "/maintain/maintainjobs": "NewWorker",
	"/notary": "New", "/otelmetered": "New", "/privacy": "New"}

// Each command of the README that gets a module, or installs the command, is all that is needed: without a tag on main, a package of one file builds
// with what one command has got. So do the modules of jobs. A failure to compile here says that a module needs code that the commit of its go.mod
// lacks: run .ci/tidy once that code is in main. Other modules come from this machine's cache, and missing ones from the proxy. It runs where
// METERED_LONG is set, as in a step of .ci/run: a module cache of its own takes a minute.
func TestModules_AreHadThroughAProxy(t *testing.T) {
	if !pgtest.Long {
		t.Skip("takes a minute: make long and .ci/run have it")
	}
	t.Parallel()
	p := &proxy{T: t, trees: map[string]string{}}
	version, err := p.version("HEAD")
	require.NoError(t, err, "the proxy is made of the repository")
	server := httptest.NewServer(p)
	defer server.Close()

	known, err := exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE", "GOPROXY").Output()
	require.NoError(t, err)
	cache, proxies, _ := strings.Cut(strings.TrimSpace(string(known)), "\n")
	home, bin := t.TempDir(), t.TempDir()
	in := func(dir, program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir = dir
		// With -trimpath a later run, with its module cache elsewhere, finds the compiled packages again. Nothing of ours may come from the cache.
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOSUMDB=off", "GOFLAGS=-modcacherw -trimpath", "GOBIN="+bin, "GOMODCACHE="+filepath.Join(home, "cache"),
			"GOPROXY="+server.URL+",file://"+filepath.Join(cache, "cache", "download")+","+proxies)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s %s\n%s", program, strings.Join(args, " "), out)
		return string(out)
	}
	readme, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	commands := regexp.MustCompile(`(?m)^ +(go (get|install) `+core+`([a-z/]*)@main)\b`).FindAllStringSubmatch(string(readme), -1)
	for _, of := range []string{"/budget/feedjobs", "/jobs/citusjobs", "/leases/carvejobs", "/maintain/maintainjobs"} {
		commands = append(commands, []string{"", "go get " + core + of + "@main", "get", of})
	}
	require.Len(t, commands, len(names)+1)
	for _, command := range commands {
		dir, module := t.TempDir(), command[3]
		if command[2] == "install" {
			in(dir, "sh", "-c", command[1])
			require.Contains(t, in(dir, filepath.Join(bin, "metered"), "--version"), version)
			continue
		}
		require.Contains(t, names, module)
		program := fmt.Sprintf("package consumer\n\nimport got %q\n\nvar _ = got.%s\n", core+module, names[module])
		in(dir, "go", "mod", "init", "example.com/consumer")
		require.NoError(t, os.WriteFile(filepath.Join(dir, "consumer.go"), []byte(program), 0o644))
		in(dir, "sh", "-c", command[1])
		in(dir, "go", "build", ".")
	}
}
