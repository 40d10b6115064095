package tokens_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/tokens"
)

// plainlyNotRandom are 32 bytes each.
func plainlyNotRandom() map[string][]byte {
	repeated := append(bytes.Clone(testKey[:11]), testKey[:11]...)
	repeated = append(repeated, testKey[:10]...)
	shuffled := make([]byte, 32) // 11 values, but many different steps
	for i := range shuffled {
		shuffled[i] = testKey[(i*i*i+i/11*i)%11]
	}
	return map[string][]byte{
		"zeros":      make([]byte, 32),
		"one byte":   bytes.Repeat([]byte{0xa7}, 32),
		"sequence":   sequence(1).FillBytes(make([]byte, 32)),
		"steps of 5": sequence(5).FillBytes(make([]byte, 32)),
		"repetition": repeated,
		"11 values":  append(bytes.Repeat(testKey[:1], 22), testKey[1:11]...),
		"shuffled":   shuffled,
	}
}

func TestNewSecret_RefusesBadSecrets(t *testing.T) {
	t.Parallel()
	good := testKey
	bad := map[string][]byte{
		"nil":        nil,
		"short":      good[:31],
		"long":       append(bytes.Clone(good), 1),
		"password":   []byte("correct horse battery staple 12!"),
		"hex":        []byte("8f1d6b0a93e24c75b1f0a2d35e679c48"),
		"base64":     []byte("jx1rCpPiTHWx8KLTXmecSBApOEdWrL7f"),
		"alphabetic": []byte("abcdefghijklmnopqrstuvwxyzABCDEF"),
	}
	for why, b := range plainlyNotRandom() {
		bad[why] = b
	}
	for why, b := range bad {
		_, err := tokens.NewSecret(b)
		t.Log(why)
		requireArgument(t, err, "Secret")
		require.NotContains(t, err.Error(), "horse", "an error must not print the secret")
	}
	_, err := tokens.NewSecret(good)
	require.NoError(t, err)
}

func TestNewSecret_KeepsItsOwnCopy(t *testing.T) {
	t.Parallel()
	b := bytes.Clone(testKey)
	secret := must(tokens.NewSecret(b))
	before := must(newStore(t).Token(secret)).Reveal()
	clear(b)
	require.Equal(t, before, must(newStore(t).Token(secret)).Reveal())
}

func TestDerive_RefusesBadArguments(t *testing.T) {
	t.Parallel()
	for why, key := range plainlyNotRandom() {
		_, err := tokens.Derive(key, "x")
		t.Log(why)
		requireArgument(t, err, "key")
	}
	for _, key := range [][]byte{nil, testKey[:31], bytes.Repeat(testKey, 33)} {
		_, err := tokens.Derive(key, "x")
		requireArgument(t, err, "key")
	}
	for _, parts := range [][]string{
		nil, {},
		make([]string, 16+1),
		{strings.Repeat("x", 4096), "y"},
	} {
		_, err := tokens.Derive(testKey, parts...)
		requireArgument(t, err, "parts")
	}
	_, err := tokens.Derive(bytes.Repeat(testKey, 32), strings.Repeat("x", 4096))
	require.NoError(t, err)
	_, err = tokens.Derive([]byte(fmt.Sprintf("%x", testKey)), make([]string, 16)...)
	require.NoError(t, err, "a long key may be text")
}

func TestDerive_IsDifferentForDifferentParts(t *testing.T) {
	t.Parallel()
	otherKey := bytes.Clone(testKey)
	otherKey[0]++
	seen := map[string][]string{}
	for _, parts := range [][]string{
		{"ab", "c"}, {"a", "bc"}, {"abc"}, {"abc", ""}, {"", "abc"}, {"a", "b", "c"},
		{"a\x00\x00\x00\x00\x00\x00\x00\x01b"}, {"a", "b"},
	} {
		for _, key := range [][]byte{testKey, otherKey} {
			text := must(newStore(t).Token(must(tokens.Derive(key, parts...)))).Reveal()
			require.NotContains(t, seen, text, "%q and %q", parts, seen[text])
			seen[text] = parts
			require.Equal(t, text, must(newStore(t).Token(must(tokens.Derive(key, parts...)))).Reveal())
		}
	}
}
