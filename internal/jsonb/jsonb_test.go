package jsonb_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/jsonb"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestCheck_AgreesWithPostgres(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	zeros := func(n int) string { return strings.Repeat("0", n) }
	for text, ok := range map[string]bool{
		`{"a": [1, "b", true, null]}`: true, `""`: true, `-0`: true, `"\\u0000"`: true, `"\\\u0000"`: false, `"\u0000"`: false,
		`{"\u0000": 1}`: false, `"\ud800"`: false, `"\udc00"`: false, `"\ud800\ud800"`: false, `"\ud800x"`: false, `"\ud83d\ude00"`: true,
		`"\ud83d\\ude00"`: false, `"\uD83D\uDE00 \" \/ é"`: true, `["\ude00\ud83d"]`: false, "\"\xff\"": false, "\"\xed\xa0\x80\"": false,
		`1e131071`: true, `1e131072`: false, `-9e200000`: false, `9.9E+131071`: true, `99e131071`: false, `0.1e131072`: true, `0.1e131073`: false,
		`0e131072`: true, `0e99999999999999999999`: false, `1e-16383`: true, `1e-16384`: false, `1.5e-16383`: false, `0.5e-16382`: true,
		`{"1e200000": "1e200000"}`: true, `[1,1e200000]`: false, `0e-16384`: false,
		"1" + zeros(131071): true, "1" + zeros(131072): false, "0." + zeros(16382) + "1": true, "0." + zeros(16383) + "1": false,
		"0." + zeros(16384): false, "0." + zeros(16384) + "e1": true,
	} {
		_, err := pool.Exec(t.Context(), "select $1::text::jsonb", text)
		require.Equal(t, ok, err == nil, "%.40s: %v", text, err)
		require.Equal(t, ok, jsonb.Check([]byte(text)) == nil, "%.40s", text)
	}
	deep := strings.Repeat(`[{"a":`, 5000) + "1" + strings.Repeat("}]", 5000)
	require.True(t, json.Valid([]byte(deep)), "as deep as encoding/json takes")
	_, err := pool.Exec(t.Context(), "select $1::text::jsonb", deep)
	require.NoError(t, err)
	require.NoError(t, jsonb.Check([]byte(deep)))
}
