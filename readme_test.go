package metered_test

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/fault"
)

func TestReadme_IsShortAndShowsACommandThatRuns(t *testing.T) {
	t.Parallel()
	readme := text(t, "README.md")
	require.LessOrEqual(t, len(strings.Fields(readme)), 1000)
	_, block, _ := strings.Cut(readme, "```go\n")
	block, rest, ok := strings.Cut(block, "```\n")
	require.True(t, ok)
	require.NotContains(t, rest, "```")
	// The lines of the program, without its indentation.
	program := strings.ReplaceAll(text(t, "examples/hello/main.go"), "\n\t\t", "\n")
	require.Contains(t, program, "\n"+block)
	require.LessOrEqual(t, strings.Count(block, "\n"), 10)
}

// "Required" lists the versions of go.mod, and "tested besides" those that the workspace builds with.
func TestReadme_EndsWithTheVersions(t *testing.T) {
	t.Parallel()
	minor := func(workspace, format string, module ...string) string {
		cmd := exec.Command("go", append([]string{"list", "-m", "-f", format}, module...)...)
		cmd.Env = append(os.Environ(), "GOWORK="+workspace)
		out, err := cmd.Output()
		require.NoError(t, err)
		return regexp.MustCompile(`^v?(\d+\.\d+).*\s*$`).ReplaceAllString(string(out), "$1")
	}
	const pgx, river = "github.com/jackc/pgx/v5", "github.com/riverqueue/river"
	work, err := filepath.Abs("go.work")
	require.NoError(t, err)
	highest := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(text(t, work))
	said := strings.Join(strings.Fields(text(t, "README.md")), " ")
	require.Equal(t, fmt.Sprintf("Requires Go %s, pgx %s, River %s and Postgres 14; tested with these and with Go %s, River %s and Postgres 15 and 18.",
		minor("off", "{{.GoVersion}}"), minor("off", "{{.Version}}", pgx), minor("off", "{{.Version}}", river),
		highest[1], minor(work, "{{.Version}}", river)), said[max(0, strings.LastIndex(said, "Requires ")):])
	require.Equal(t, minor("off", "{{.Version}}", pgx), minor(work, "{{.Version}}", pgx), "the other pgx is to be named too")
}

func TestDocs_NameTestsThatExist(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	files(t, "_test.go", func(path string) { all.WriteString(text(t, path)) })
	named := 0
	files(t, ".md", func(path string) {
		for _, name := range regexp.MustCompile("`((?:Test|Example)[A-Za-z_0-9]+)`").FindAllStringSubmatch(text(t, path), -1) {
			named++
			if !strings.Contains(all.String(), "\nfunc "+name[1]+"(") {
				t.Errorf("%s names %s, which is not there", path, name[1])
			}
		}
	})
	require.Greater(t, named, 60)
}

// docs/compared.md names a test for each difference, but for the database itself, and codes that docs/http.md explains.
func TestDocs_ComparedNamesTestsAndCodes(t *testing.T) {
	t.Parallel()
	page := text(t, "docs/compared.md")
	rows := regexp.MustCompile(`(?m)^\| ([A-Z].*) \| .* \| .* \| *(.*?) *\|$`).FindAllStringSubmatch(page, -1)
	require.Greater(t, len(rows), 25)
	for _, row := range rows {
		if row[1] != "It runs on SQLite." {
			require.Regexp(t, "`(Test|Example)", row[2], row[1])
		}
	}
	_, errors, ok := strings.Cut(page, "## Their errors, and ours\n")
	require.True(t, ok)
	codes, explained := 0, text(t, "docs/http.md")
	for _, row := range regexp.MustCompile(`(?m)^\| .* \| (.*) \|$`).FindAllStringSubmatch(errors, -1) {
		for _, code := range regexp.MustCompile("`[a-z]+_[a-z_]+`").FindAllString(row[1], -1) {
			codes++
			require.Contains(t, explained, code)
		}
	}
	require.Greater(t, codes, 12)
}

func TestDocs_LinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	links := 0
	code := regexp.MustCompile("(?ms)^```.*?^```")
	files(t, ".md", func(path string) {
		for _, link := range regexp.MustCompile(`\]\(([^)#\s]*)(#[^)]*)?\)`).FindAllStringSubmatch(code.ReplaceAllString(text(t, path), ""), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			links++
			target := filepath.Join(filepath.Dir(path), filepath.FromSlash(link[1]))
			if link[1] == "" {
				target = path
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which is not there", path, link[1])
				continue
			}
			if link[2] != "" && !hasHeading(text(t, target), link[2]) {
				t.Errorf("%s links to %s%s, which is not there", path, link[1], link[2])
			}
		}
	})
	require.Greater(t, links, 60)
}

func TestDocs_DecisionsHaveNumbersOfTheirOwn(t *testing.T) {
	t.Parallel()
	seen := map[int]string{}
	files(t, ".md", func(path string) {
		name, ok := strings.CutPrefix(filepath.ToSlash(path), "docs/adr/")
		if !ok {
			return
		}
		number, err := strconv.Atoi(name[:4])
		require.NoError(t, err, path)
		require.Empty(t, seen[number], path)
		seen[number] = path
		require.True(t, strings.HasPrefix(text(t, path), fmt.Sprintf("# %d. ", number)), path)
	})
	require.Greater(t, len(seen), 12)
}

// hasHeading looks for the heading that an anchor names, as GitHub spells anchors.
func hasHeading(markdown, anchor string) bool {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(markdown, -1) {
		bare := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		if "#"+strings.ReplaceAll(bare, " ", "-") == anchor {
			return true
		}
	}
	return false
}

// The Go snippets of these pages are lines of examples that are compiled and run. A line of "// …" stands for lines
// that are left out.
func TestDocs_SnippetsAreOfExamplesThatRun(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	lines := func(code string) string { // without indentation and empty lines
		return "\n" + regexp.MustCompile(`\s*\n\s*`).ReplaceAllString(strings.TrimSpace(code), "\n") + "\n"
	}
	var examples strings.Builder
	files(t, ".go", func(path string) {
		if strings.HasPrefix(path, "examples") || strings.HasPrefix(filepath.Base(path), "example_") {
			examples.WriteString(lines(text(t, path)))
		}
	})
	for _, page := range []string{"docs/plans.md", "docs/rates.md", "docs/migrating.md", "docs/credit.md", "docs/jobs.md", "docs/streaming.md", "docs/thresholds.md", "docs/gateway.md", "docs/seats.md", "docs/privacy.md", "docs/notary.md"} {
		blocks := regexp.MustCompile("(?s)\n```go\n(.*?)\n```\n").FindAllStringSubmatch(text(t, page), -1)
		require.NotEmpty(t, blocks, page)
		for _, block := range blocks {
			for part := range strings.SplitSeq(lines(block[1]), "// …\n") {
				if part != "\n" && !strings.Contains(examples.String(), "\n"+strings.TrimLeft(part, "\n")) {
					t.Errorf("%s: no example has\n%s", page, part)
				}
			}
		}
	}
}

// docs/http.md has each code that the library makes, with the status that httpmetered gives it.
func TestDocs_HTTPTableEqualsTheAnswers(t *testing.T) {
	t.Parallel()
	_, table, ok := strings.Cut(text(t, "docs/http.md"), "\n| codes | status |")
	require.True(t, ok)
	table, _, _ = strings.Cut(table, "\n\n")
	answered := map[string]bool{"budget_exceeded": true} // has a table of its own
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*`) \\| (\\d+)([^|]*) \\|").FindAllStringSubmatch(table, -1) {
		for _, code := range strings.Fields(strings.ReplaceAll(row[1], "`", "")) {
			require.False(t, answered[code], code)
			answered[code] = true
			err := error(fault.New(code, "an error"))
			if code == "timeout" { // it is always both
				err = fmt.Errorf("%w: %w", err, context.DeadlineExceeded)
			}
			p := httpmetered.ProblemOf(err)
			require.Equal(t, strconv.Itoa(p.Status), row[2], code)
			require.Equal(t, p.RetryAfterSeconds == 1, strings.Contains(row[3], "`Retry-After: 1`"), code)
		}
	}
	files(t, ".go", func(path string) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		for _, code := range regexp.MustCompile(`fault\.New\("([a-z_]+)"`).FindAllStringSubmatch(text(t, path), -1) {
			if !answered[code[1]] {
				t.Errorf("docs/http.md lacks %s of %s", code[1], path)
			}
		}
	})
	require.Greater(t, len(answered), 40)
}

// files calls f for each file whose name ends so, but those of packages that npm brought.
func files(t *testing.T, suffix string, f func(path string)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "node_modules" {
			return fs.SkipDir
		}
		if err == nil && strings.HasSuffix(path, suffix) {
			f(path)
		}
		return err
	}))
}

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// Readers copy these files into a module of theirs, which can import no internal package: each file that has an
// Example, and each file of a program in examples. The demonstration of a program, in main.go and show.go, may import
// examples/internal.
func TestExamples_ImportNoInternalPackage(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	shown := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		own := filepath.ToSlash(path)
		program := strings.HasPrefix(own, "examples/") && !strings.HasPrefix(own, "examples/internal/") && !strings.HasSuffix(own, "_test.go")
		if err != nil || !strings.HasSuffix(own, ".go") || !program && !strings.HasSuffix(own, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil || !program && !hasExample(file) {
			return err
		}
		shown++
		for _, spec := range file.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			demonstrates := program && (filepath.Base(path) == "main.go" || filepath.Base(path) == "show.go")
			if strings.Contains(name+"/", "/internal/") && !(demonstrates && strings.HasPrefix(name, "github.com/pgmetered/metered/examples/internal/")) {
				t.Errorf("%s imports %s", own, name)
			}
		}
		return nil
	}))
	require.Greater(t, shown, 50)
}

func hasExample(file *ast.File) bool {
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Example") {
			return true
		}
	}
	return false
}
