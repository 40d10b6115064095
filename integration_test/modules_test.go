package integration_test

import (
	"archive/zip"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

const core = "github.com/pgmetered/metered"

// serve writes the module of a directory as a proxy serves it.
func serve(t *testing.T, proxy, module, version, dir string) {
	t.Helper()
	at := filepath.Join(proxy, filepath.FromSlash(module), "@v")
	require.NoError(t, os.MkdirAll(at, 0o755))
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	require.NoError(t, err)
	for name, text := range map[string]string{
		"list": version + "\n", version + ".mod": string(mod), version + ".info": fmt.Sprintf(`{"Version":%q,"Time":"2026-01-02T03:04:05Z"}`, version),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(at, name), []byte(text), 0o644))
	}
	file, err := os.Create(filepath.Join(at, version+".zip"))
	require.NoError(t, err)
	defer func() { require.NoError(t, file.Close()) }()
	archive := zip.NewWriter(file)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") {
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
		w, err := archive.Create(module + "@" + version + "/" + filepath.ToSlash(name))
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	}))
	require.NoError(t, archive.Close())
}

// committed is a directory with the files of the last commit. Without git it is the working tree.
func committed(t *testing.T) string {
	t.Helper()
	archive, err := exec.CommandContext(t.Context(), "git", "-C", "..", "archive", "HEAD").Output()
	if err != nil {
		t.Logf("the working tree is served: git archive: %v", err)
		return ".."
	}
	dir := t.TempDir()
	unpack := exec.CommandContext(t.Context(), "tar", "-x", "-C", dir)
	unpack.Stdin = bytes.NewReader(archive)
	out, err := unpack.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

const consumer = `package main

import (
	"fmt"
	"net/http"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/otelmetered"
)

var (
	_ http.Handler     = (*console.Handler)(nil)
	_ observe.Observer = (*otelmetered.Observer)(nil)
)

func main() { fmt.Println("schema", metered.SchemaVersion) }
`

// Every module can be required and every command installed without a clone, once the versions that they require of
// each other are tagged. Other modules come from this machine's cache, and missing ones from the proxy. It runs where METERED_LONG is set, as in a
// step of .ci/run: a module cache of its own takes a minute.
func TestModules_AreHadThroughAProxy(t *testing.T) {
	if !pgtest.Long {
		t.Skip("takes a minute: make long and .ci/run have it")
	}
	t.Parallel()
	root := committed(t)
	work, err := os.ReadFile(filepath.Join(root, "go.work"))
	require.NoError(t, err)
	required := regexp.MustCompile(`(?m)^\s(`+core+`\S*) (v\S+) => (\S+)$`).FindAllStringSubmatch(string(work), -1)
	proxy, version := t.TempDir(), ""
	for _, m := range required {
		serve(t, proxy, m[1], m[2], filepath.Join(root, m[3]))
		if m[1] == core {
			version = m[2]
		}
	}
	require.NotEmpty(t, version)
	commands := []string{"cmd/metered"}
	for _, command := range commands {
		serve(t, proxy, core+"/"+command, version, filepath.Join(root, command))
	}

	known, err := exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE", "GOPROXY").Output()
	require.NoError(t, err)
	cache, proxies, _ := strings.Cut(strings.TrimSpace(string(known)), "\n")
	dir, bin := t.TempDir(), t.TempDir()
	run := func(program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir = dir
		// With -trimpath a later run, with its module cache elsewhere, finds the compiled packages again.
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOSUMDB=off", "GOFLAGS=-modcacherw -trimpath", "GOBIN="+bin, "GOMODCACHE="+filepath.Join(dir, "cache"),
			"GOPROXY=file://"+proxy+",file://"+filepath.Join(cache, "cache", "download")+","+proxies)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s %s\n%s", program, strings.Join(args, " "), out)
		return string(out)
	}
	run("go", "mod", "init", "example.com/consumer")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(consumer), 0o644))
	get := []string{"get"}
	for _, m := range required {
		get = append(get, m[1]+"@"+m[2])
	}
	run("go", get...)
	require.Regexp(t, `schema \d+\n$`, run("go", "run", "."))
	for _, command := range commands {
		run("go", "install", core+"/"+command+"@"+version)
	}
	require.Contains(t, run(filepath.Join(bin, "metered"), "--version"), version)
}
