package pgtest

import (
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/schema"
)

// Next is a made-up version of the schema after this build's, for tests of upgrades. It has one
// change of each kind: a column that a migration fills, an index, a type, a function that gains an
// argument, a function with another body, and a view that loses a column.
func Next(t testing.TB) *schema.Release {
	t.Helper()
	return schema.Load(NextFiles(t), schema.Version+1)
}

// nextEdits are the changes of the next version to the files of this one.
var nextEdits = []struct{ file, old, new string }{
	{"sql/types.sql", "-- A fingerprint: a version byte", `-- Who claims the key of a job.
create type metered.claimant as (
    holder text
);

-- A fingerprint: a version byte`},
	{"sql/tables.sql", fmt.Sprintf("(version) values (%d);", schema.Version), fmt.Sprintf("(version) values (%d);", schema.Version+1)},
	{"sql/jobtables.sql", "    primary key (queue, key)\n);\n", `    claimant   text,                    -- who claimed it; null of the build before
    primary key (queue, key)
);

create index job_keys_claimant on metered.job_keys (claimant) where claimant is not null;
`},
	{"sql/jobs.sql", "    new_id bigint, wait_ms int,\n", "    new_id bigint, wait_ms int, claimed_by metered.claimant,\n"},
	{"sql/jobs.sql", "(job_id, created_at, queue, key, kind, tenant, digest)\n", "(job_id, created_at, queue, key, kind, tenant, digest, claimant)\n"},
	{"sql/jobs.sql", "of_kind, of_tenant, of_digest)\n        on conflict", "of_kind, of_tenant, of_digest, claimed_by.holder)\n        on conflict"},
	{"sql/jobs.sql", "of_digest, new_id, wait_ms) c);", "of_digest, new_id, wait_ms, null) c);"},
	{"sql/jobs.sql", "where k.queue = of_queue and k.key = of_key;\nend", "where k.key = of_key and k.queue = of_queue;\nend"},
	{"sql/reporting.sql", "    t.used,                                     -- how often it was\n    t.sole                                      -- whether it replaced the subject's token before it\n",
		"    t.used                                      -- how often it was\n"},
}

const nextMigration = `-- The next version: a key of a job says who claimed it.
alter table metered.job_keys add column claimant text;
create index job_keys_claimant on metered.job_keys (claimant) where claimant is not null;
update metered.job_keys set claimant = 'build before' where tenant <> '';
`

var nextCatalog = struct {
	sync.Mutex
	text string
}{}

// NextFiles are the source of Next.
func NextFiles(t testing.TB) fstest.MapFS {
	t.Helper()
	files := make(fstest.MapFS)
	err := fs.WalkDir(schema.Files, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var text []byte
			text, err = fs.ReadFile(schema.Files, path)
			files[path] = &fstest.MapFile{Data: text}
		}
		return err
	})
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	for _, edit := range nextEdits {
		text := string(files[edit.file].Data)
		next, places := Replace(text, edit.old, edit.new)
		if places != 1 {
			t.Fatalf("pgtest: the next version changes %q, which is %d times in %s", edit.old, places, edit.file)
		}
		files[edit.file].Data = []byte(next)
	}
	files[fmt.Sprintf("versions/%04d.txt", schema.Version)] = files["catalog.txt"]
	files[fmt.Sprintf("versions/%04d.sql", schema.Version+1)] = &fstest.MapFile{Data: []byte(nextMigration)}
	nextCatalog.Lock()
	defer nextCatalog.Unlock()
	if nextCatalog.text == "" {
		files["catalog.txt"] = &fstest.MapFile{}
		nextCatalog.text = catalogOf(t, schema.Load(files, schema.Version+1))
	}
	files["catalog.txt"] = &fstest.MapFile{Data: []byte(nextCatalog.text)}
	return files
}

// catalogOf is the catalog of a fresh schema of the release.
func catalogOf(t testing.TB, r *schema.Release) string {
	t.Helper()
	pool := OpenWith(t, Options{Empty: true})
	n, err := schema.Parse("")
	if err == nil {
		_, err = pool.Exec(t.Context(), schema.Script(r.Source()), pgx.QueryExecModeSimpleProtocol)
	}
	if err != nil {
		t.Fatalf("pgtest: the next version: %v", err)
	}
	c, err := r.Read(t.Context(), pool, n)
	if err != nil {
		t.Fatalf("pgtest: the next version: %v", err)
	}
	return c.Text()
}
