package pgserver

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// oldestMajor is the oldest server the library is made for. Newer ones than we know are accepted.
const oldestMajor = 14

// places is where to look for server binaries. A variable of its own so that tests can make a
// machine that has none.
type places struct {
	path        string   // in the form of $PATH
	pgConfig    string   // a command that answers --bindir
	directories []string // patterns
	download    *download
}

func usualPlaces() places {
	return places{
		path:     os.Getenv("PATH"),
		pgConfig: "pg_config",
		directories: []string{
			"/usr/lib/postgresql/*/bin",                          // Debian, Ubuntu
			"/usr/pgsql-*/bin",                                   // PGDG on RHEL, Fedora, Rocky
			"/usr/lib/postgresql*/bin",                           // SUSE
			"/usr/libexec/postgresql*",                           // Alpine
			"/usr/bin",                                           // Fedora, Arch
			"/usr/local/bin",                                     // FreeBSD, the official Docker image on Alpine
			"/usr/local/pgsql/bin",                               // built from source
			"/opt/homebrew/opt/postgresql@*/bin",                 // Homebrew on ARM
			"/usr/local/opt/postgresql@*/bin",                    // Homebrew on Intel
			"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",    // Homebrew on Linux
			"/Applications/Postgres.app/Contents/Versions/*/bin", // Postgres.app
			"/opt/local/lib/postgresql*/bin",                     // MacPorts
		},
		download: usualDownload(),
	}
}

// installation is a directory with a usable postgres and initdb in it.
type installation struct {
	dir   string
	major int
}

// installed returns the machine's servers, in the order to try them, and why it passed others over.
// Those of $PATH and pg_config come first, as somebody's choice, and the rest newest first.
func (p places) installed(ctx context.Context, as account) (found []installation, passedOver []attempt) {
	seen := map[string]bool{}
	look := func(dir string) (ok []installation) {
		if !filepath.IsAbs(dir) || !isExecutable(filepath.Join(dir, "postgres")) || !isExecutable(filepath.Join(dir, "initdb")) {
			return nil
		}
		real, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
		if err != nil || seen[real] {
			return nil
		}
		seen[real] = true
		major, err := majorVersion(ctx, dir, as)
		if err == nil && major < oldestMajor {
			err = fmt.Errorf("version %d is too old, %d or newer is needed", major, oldestMajor)
		}
		if err != nil {
			passedOver = append(passedOver, attempt{source: dir, err: err})
			return nil
		}
		return []installation{{dir, major}}
	}

	for _, dir := range filepath.SplitList(p.path) {
		found = append(found, look(dir)...)
	}
	if out, err := exec.CommandContext(ctx, p.pgConfig, "--bindir").Output(); err == nil {
		found = append(found, look(strings.TrimSpace(string(out)))...)
	}
	var usual []installation
	for _, pattern := range p.directories {
		dirs, _ := filepath.Glob(pattern)
		for _, dir := range dirs {
			usual = append(usual, look(dir)...)
		}
	}
	slices.SortStableFunc(usual, func(a, b installation) int { return cmp.Compare(b.major, a.major) })
	found = append(found, usual...)

	if len(found) == 0 && len(passedOver) == 0 {
		passedOver = []attempt{{
			source: "server binaries on this machine",
			err: fmt.Errorf("none in PATH, in the answer of %s --bindir, or in %s",
				p.pgConfig, strings.Join(p.directories, ", ")),
		}}
	}
	if len(found) == 0 {
		passedOver[len(passedOver)-1].fix = "install a Postgres server, " + strconv.Itoa(oldestMajor) + " or newer: " +
			"apt-get install postgresql, dnf install postgresql-server, apk add postgresql, brew install postgresql@17, …"
	}
	return found, passedOver
}

func isExecutable(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}

// "postgres (PostgreSQL) 16.4 (Debian 16.4-1)", "postgres (PostgreSQL) 18beta1"
var versionPattern = regexp.MustCompile(`PostgreSQL\) (\d+)`)

// majorVersion runs the server binary as the account that is to run it later: root can read a
// directory below /root, which that account cannot.
func majorVersion(ctx context.Context, dir string, as account) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version")
	cmd.Dir = "/"
	cmd.Env = environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as.credential}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("postgres --version as %s: %w %s", as.name, err, strings.TrimSpace(string(out)))
	}
	match := versionPattern.FindSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("postgres --version answered %q", out)
	}
	return strconv.Atoi(string(match[1]))
}
