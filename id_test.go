package metered_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
)

func TestNewID_IsAUUIDOfVersion7ThatDoCarriesTheTimeOf(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	before := time.Now().Truncate(time.Millisecond)
	id := metered.NewID()
	var uuid pgtype.UUID
	require.NoError(t, uuid.Scan(id))
	require.Equal(t, byte(7), uuid.Bytes[6]>>4)
	require.Equal(t, byte(0b10), uuid.Bytes[8]>>6)
	require.NotEqual(t, id, metered.NewID())

	_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id}, nil)
	require.NoError(t, err)
	op, err := c.Lookup(t.Context(), pool, "", id)
	require.NoError(t, err)
	require.False(t, op.IssuedAt.Before(before))
	require.False(t, op.IssuedAt.After(time.Now()))
}
