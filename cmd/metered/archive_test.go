package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestVerify_FindsWhatIsWrongInAnArchive(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pool, c := shop(t)
	binary := filepath.Join(t.TempDir(), "archive")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".")
	build.Dir = "../../examples/archive"
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	dir := t.TempDir()
	archiveInto := func(dir string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), binary, "-dir", dir)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+pgtest.ConnString(pool))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	archive := func() { t.Helper(); archiveInto(dir) }
	charge := func(amount int64) {
		t.Helper()
		_, err := c.Budget.ChargeNow(t.Context(), pool, budget.Charge{Scope: "org/acme", Amount: amount})
		require.NoError(t, err)
	}
	archive()
	pgtest.SetClock(t, pool, time.Now().Add(48*time.Hour))
	charge(3)
	charge(4)
	archive()
	pgtest.SetClock(t, pool, time.Now().Add(96*time.Hour)) // the archive's Migrate put the clock right
	charge(6)
	charge(7)
	archive()

	nowhere := &line{t: t, ctx: t.Context()}
	reports := as(t, pool, metered.GrantReportingSQL)
	all := pgtest.Count(t, pool, "metered.ledger")
	// A hold of the shop falls due an hour after it was placed, which may be on the day after.
	days := pgtest.Value[float64](t, pool, "select count(distinct date_trunc('day', at, 'UTC')) from metered.ledger")
	require.GreaterOrEqual(t, days, 3.0)
	whole := nowhere.object("verify", "--archive", dir)
	require.Equal(t, map[string]any{"ok": true, "files": days, "closed": days - 1, "entries": float64(all), "first": 1.0, "last": float64(all)}, whole)
	require.Contains(t, reports.ok("verify", "--archive", dir, "--against", "database"), "entries compared with the database.\nNo difference.")
	require.EqualValues(t, all, reports.object("verify", "--archive", dir, "--against", "database")["compared"])

	files, err := filepath.Glob(filepath.Join(dir, "2*.jsonl"))
	require.NoError(t, err)
	slices.Sort(files)
	first, closed, open := filepath.Base(files[0]), filepath.Base(files[len(files)-2]), filepath.Base(files[len(files)-1])
	for name, tt := range map[string]struct {
		file                string
		edit                func(text string) string // "": the file is removed
		database            bool
		wrong, field, entry string
	}{
		"an edited amount":           {closed, edit(`"amount":4`, `"amount":5`), false, closed, "spent", "org/acme"},
		"an edited amount and sum":   {open, edit(`"amount":7,`, `"amount":8,`, `"spent":36`, `"spent":37`), true, open, "amount", "org/acme"},
		"an edited note":             {first, edit(`"reason":"first"`, `"reason":"other"`), false, first, "sha256", ""},
		"a cut tail":                 {closed, cutLine, false, closed, "last number", ""},
		"a cut line":                 {closed, func(text string) string { return text[:len(text)-5] }, false, closed, "last number", ""},
		"a cut tail of an open file": {open, cutLine, true, archiveLast, "last number", ""},
		"a line in between": {first, func(text string) string {
			_, rest, _ := strings.Cut(text, "\n")
			i := strings.Index(rest, "\n")
			return text[:len(text)-len(rest)] + rest[i+1:]
		}, false, first, "number", ""},
		"a missing file":             {closed, nil, false, closed, "file", ""},
		"a missing open file":        {open, nil, true, archiveLast, "last number", ""},
		"a missing manifest's file":  {first, nil, false, first, "file", ""},
		"no line":                    {open, func(string) string { return "what\n" }, false, open, "line", ""},
		"a manifest of another form": {archiveManifest, func(string) string { return "what\n" }, false, archiveManifest, "line", ""},
		"a kind that is not known":   {open, edit(`"kind":"charge"`, `"kind":"gift"`), false, open, "kind", "org/acme"},
	} {
		copied := t.TempDir()
		require.NoError(t, os.CopyFS(copied, os.DirFS(dir)))
		path := filepath.Join(copied, tt.file)
		if tt.edit == nil {
			require.NoError(t, os.Remove(path))
		} else {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			edited := tt.edit(string(text))
			require.NotEqual(t, string(text), edited, name)
			require.NoError(t, os.WriteFile(path, []byte(edited), 0o600))
		}
		args := []string{"verify", "--archive", copied}
		l := nowhere
		if tt.database {
			nowhere.ok(args...) // only the database knows
			args, l = append(args, "--against", "database"), reports
		}
		require.Contains(t, l.exits(exitDifferences, args...).out, "It stopped at the first difference.", name)
		found := l.exits(exitDifferences, append(args, "--json")...).objects()[0]["difference"].(map[string]any)
		if tt.wrong == archiveLast {
			tt.wrong = found["file"].(string)
		}
		require.Equal(t, []any{tt.wrong, tt.field}, []any{found["file"], found["field"]}, name)
		if tt.entry != "" {
			require.Equal(t, tt.entry, found["scope"], name)
		}
	}

	// A page that was written twice, and a line that is not written to its end.
	text, err := os.ReadFile(filepath.Join(dir, open))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, open), append(bytes.Repeat(text, 2), "{"...), 0o600))
	r := nowhere.object("verify", "--archive", dir)
	require.EqualValues(t, []any{float64(all), 2.0, 1.0}, []any{r["entries"], r["repeated"], r["unfinished"]})
	require.Contains(t, nowhere.ok("verify", "--archive", dir), "2 lines repeated.\n1 line unfinished.\n")

	// A scope that is gone is in the archive alone, also if another has its name now.
	cli(t, pool).ok("pseudonymize", "--subject", "org/globex", "--alias", "gone/1", "--yes")
	require.EqualValues(t, 1, reports.object("verify", "--archive", dir, "--against", "database")["gone"])

	// The files keep the name, as docs/privacy.md says. An archive that is made anew has the alias.
	having := func(dir, name string) (files int) {
		t.Helper()
		paths, err := filepath.Glob(filepath.Join(dir, "*"))
		require.NoError(t, err)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			if bytes.Contains(text, []byte(name)) {
				files++
			}
		}
		return files
	}
	require.Positive(t, having(dir, "org/globex"))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.DropFeedConsumer(t.Context(), tx, archiveConsumer)
		return err
	}))
	anew := t.TempDir()
	archiveInto(anew)
	require.Zero(t, having(anew, "org/globex"))
	require.Positive(t, having(anew, "gone/1"))
	nowhere.ok("verify", "--archive", anew)

	_, err = c.Budget.ChargeNow(t.Context(), pool, budget.Charge{Scope: "org/globex", Amount: 9})
	require.NoError(t, err)
	require.EqualValues(t, 1, reports.object("verify", "--archive", dir, "--against", "database")["gone"])
	require.Contains(t, reports.ok("verify", "--archive", dir, "--against", "database"), "1 entry no longer in the database.\n")

	nowhere.exits(exitUsage, "verify", "--archive", t.TempDir())
	nowhere.exits(exitUsage, "verify", "--archive", dir, "--against", "head")
	nowhere.exits(exitUsage, "verify", "--archive", dir, "--scope", "org/acme")
	nowhere.exits(exitUsage, "verify", "--key", "k")
}

// archiveLast stands for the file with the archive's last line.
const archiveLast = "the last file"

func edit(pairs ...string) func(string) string {
	return func(text string) string { return strings.NewReplacer(pairs...).Replace(text) }
}

func cutLine(text string) string {
	return text[:strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n")+1]
}
