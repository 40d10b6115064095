package pgserver

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStartStandby_IsOfAServerOfOurs(t *testing.T) {
	t.Parallel()
	primary := start(t, Options{})
	other, err := connectTo(t.Context(), primary.ConnString())
	require.NoError(t, err)
	_, err = StartStandby(t.Context(), other, Options{})
	require.ErrorIs(t, err, ErrNotOwned)
	_, err = StartStandby(t.Context(), primary, Options{TCP: true})
	require.ErrorContains(t, err, "TCP")
	if _, err := primary.in.withBasebackup(); err != nil {
		t.Skip(err)
	}
	require.NoError(t, primary.Kill())
	_, err = StartStandby(t.Context(), primary, Options{})
	require.ErrorContains(t, err, "pg_basebackup")
}
