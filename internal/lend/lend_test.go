package lend_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/lend"
)

type functions struct{}

func (functions) Double(n int) int { return 2 * n }

func TestBorrow_IsOfWhatIsLentWithItsTypes(t *testing.T) {
	t.Parallel()
	lend.Lend("numbers", functions{})
	require.Equal(t, 6, lend.Borrow[interface{ Double(int) int }]("numbers").Double(3))
	require.Panics(t, func() { lend.Lend("numbers", functions{}) })
	require.Panics(t, func() { lend.Borrow[interface{ Double(int64) int }]("numbers") })
	require.Panics(t, func() { lend.Borrow[interface{ Treble(int) int }]("numbers") })
	require.Panics(t, func() { lend.Borrow[interface{ Double(int) int }]("letters") })
}
