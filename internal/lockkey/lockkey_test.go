package lockkey_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/lockkey"
)

// Releases that run side by side must agree: the first 8 bytes of
//
//	printf 'metered/scope/metered\0org/acme' | sha256sum
func TestOf_IsGolden(t *testing.T) {
	t.Parallel()
	for _, golden := range []struct {
		space, name string
		key         int64
	}{
		{"metered/scope/metered", "org/acme", 3775460004313942042},
		{"metered/scope/billing", "org/acme", -8832022346701570808},
		{"metered/scope/metered", "", -3157859972978334403},
		{"", "", 7940984811893783192},
	} {
		require.Equal(t, golden.key, lockkey.Of(golden.space, golden.name), "%q %q", golden.space, golden.name)
	}
}

func TestOf_SpaceAndNameDoNotRunIntoEachOther(t *testing.T) {
	t.Parallel()
	require.NotEqual(t, lockkey.Of("ab", "c"), lockkey.Of("a", "bc"))
}
