package metered

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/tokens"
)

// offline is a client that has no database.
func offline(t testing.TB) *Client {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	c, err := New(pool, Config{SecretKey: []byte("0123456789abcdefghijklmnopqrstuvw"), TokenPrefix: "up"})
	require.NoError(t, err)
	return c
}

func presented(t testing.TB, c *Client) string {
	t.Helper()
	secret, err := c.Secret("", "op", "golden")
	require.NoError(t, err)
	m, err := c.Tokens.TokenOf(secret)
	require.NoError(t, err)
	return m.Reveal()
}

// A stored fingerprint is compared with one made by a later release: these must
// never change, unless fingerprintVersion does.
func TestFingerprint_Golden(t *testing.T) {
	t.Parallel()
	c := offline(t)
	at := time.Date(2031, 5, 6, 12, 0, 0, 123457999, time.UTC)
	for _, v := range []struct {
		cmd  Command
		want string
	}{
		{Command{ID: "a"}, ""},
	} {
		op, err := c.prepare(v.cmd)
		require.NoError(t, err)
		require.Equal(t, v.want, hex.EncodeToString(op.fingerprint))
	}
	_ = at
	_ = bytes.Equal
	_ = strings.ToLower
	_ = budget.Charge{}
	_ = tokens.Mint{}
}
