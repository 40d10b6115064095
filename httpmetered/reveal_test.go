package httpmetered_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// A link that a handler mints is in each answer, also in those of replays, and in no row: the answer on record has its place.
func TestIdempotent_ALinkIsRevealedAndNotStored(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store, err := tokens.New(tokens.Config{})
	require.NoError(t, err)
	var broken error
	for _, optional := range []bool{false, true} {
		answer := func(w http.ResponseWriter, r *http.Request) {
			tx := httpmetered.Tx(r)
			secret, err := tx.Secret("link")
			if err == nil {
				_, err = store.Mint(r.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", Secret: secret})
			}
			if err != nil {
				httpmetered.Write(w, err)
				return
			}
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write([]byte(`{"link":"https://example.com/u/LINK"}`))
		}
		s := branch(t, pool, httpmetered.IdempotentConfig{
			Optional: optional,
			Reveal: func(_ *http.Request, secret func(string) (tokens.Secret, error), body []byte) ([]byte, error) {
				of, err := secret("link")
				if err != nil || broken != nil {
					return nil, errors.Join(err, broken)
				}
				token, err := store.Token(of)
				return bytes.ReplaceAll(body, []byte("LINK"), []byte(token.Reveal())), err
			},
		}, metered.Config{SecretKey: []byte("an example's key, 32 bytes or more: draw yours by crypto/rand")}, answer)
		key := []string{fmt.Sprint("key-", optional)}
		if optional {
			key = nil
		}
		first := s.post("six", key...)
		require.Equal(t, 201, first.status, first.body)
		var got struct{ Link string }
		require.NoError(t, json.Unmarshal([]byte(first.body), &got))
		text := got.Link[len("https://example.com/u/"):]
		info, err := store.Inspect(t.Context(), pool, "upload", "ann", text)
		require.NoError(t, err)
		require.Equal(t, "upload", info.Purpose)
		if !optional {
			require.Equal(t, first, s.post("six", key...), "a replay has the same link")
			broken = errors.New("no link now")
			require.Equal(t, 500, s.post("six", key...).status)
			require.ErrorIs(t, s.told()[0], broken)
			broken = nil
			require.Equal(t, first, s.post("six", key...))
		}
		for _, table := range []string{"operations", "tokens"} {
			found := pgtest.Value[int64](t, pool, fmt.Sprintf(`select count(*) from metered.%s r where strpos(r::text, '%s') > 0
				or strpos(r::text, encode(convert_to('%[2]s', 'UTF8'), 'hex')) > 0 or strpos(r::text, encode(convert_to('%[2]s', 'UTF8'), 'base64')) > 0`, table, text))
			require.Zero(t, found, table)
		}
		var stored string
		require.NoError(t, pool.QueryRow(t.Context(), `select convert_from(result, 'UTF8') from metered.operations order by at desc limit 1`).Scan(&stored))
		require.Contains(t, stored, "/u/LINK")
	}
}
