package schema_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/schema"
)

func TestSource_IsTheFileInTheRoot(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("../../schema.sql")
	require.NoError(t, err)
	require.Equal(t, schema.Source(), string(file), "run: go generate .")
}
