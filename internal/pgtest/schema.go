package pgtest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// Schema is the text of an earlier version of the schema, under its default name.
func Schema(t testing.TB, version int) string {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(file), "..", "schema", "testdata", fmt.Sprintf("version%d.sql", version)))
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return string(text)
}
