package tokens_test

import (
	"crypto/sha256"
	"encoding/hex"
	"hash/crc32"
	"math/big"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/tokens"
)

const digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

func hexKey(text string) ([]byte, error) { return hex.DecodeString(text) }

// rawSecret is the 32 bytes in a token's text, read without the package.
func rawSecret(t testing.TB, text string) []byte {
	t.Helper()
	n, ok := new(big.Int).SetString(text[len(text)-49:len(text)-6], 62)
	require.True(t, ok)
	return n.FillBytes(make([]byte, 32))
}

// withChecksum adds the right checksum to a text, without the package: anything else may be wrong with the text.
func withChecksum(text string) string {
	sum, out := crc32.ChecksumIEEE([]byte(text)), ""
	for range 6 {
		out = string(digits[sum%62]) + out
		sum /= 62
	}
	return text + out
}

// The vectors were made by an independent program (Python: int, zlib.crc32,
// hashlib), not by this package. If one changes, tokens that were handed out die.
func TestGoldenVectors(t *testing.T) {
	t.Parallel()
	for _, v := range goldenVectors {
		store, err := tokens.New(tokens.Config{Prefix: v.prefix})
		require.NoError(t, err)
		secret, err := tokens.NewSecret(must(hexKey(v.secret)))
		require.NoError(t, err)
		token, err := store.Token(secret)
		require.NoError(t, err)
		require.Equal(t, v.text, token.Reveal())
		require.Equal(t, v.digest, token.Digest().String())

		parsed, err := store.Parse(v.text)
		require.NoError(t, err)
		require.Equal(t, token.Digest(), parsed.Digest())
	}
}

func TestDerive_GoldenVectors(t *testing.T) {
	t.Parallel()
	for _, v := range deriveVectors {
		secret, err := tokens.Derive(testKey, v.parts...)
		require.NoError(t, err)
		token := must(newStore(t).Token(secret))
		require.Equal(t, v.secret, hex.EncodeToString(rawSecret(t, token.Reveal())), "%q", v.parts)
	}
}

func TestParse_RefusesEverySingleCharacterChange(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	text := must(store.Token(must(tokens.Derive(testKey, "typing")))).Reveal()
	for i := range len(text) {
		for c := range 256 {
			if byte(c) == text[i] {
				continue
			}
			_, err := store.Parse(text[:i] + string([]byte{byte(c)}) + text[i+1:])
			requireInvalid(t, err, "malformed")
		}
		_, err := store.Parse(text[:i] + text[i+1:])
		requireInvalid(t, err, "malformed")
		if i > 0 && text[i] != text[i-1] {
			_, err = store.Parse(text[:i-1] + text[i:i+1] + text[i-1:i] + text[i+1:])
			requireInvalid(t, err, "malformed")
		}
	}
}

// malformed are texts that only a parser's own check refuses: all but the first
// few have the right prefix, length and checksum.
func malformed(t testing.TB) map[string]string {
	good := must(newStore(t).Token(must(tokens.Derive(testKey, "good")))).Reveal()
	other := must(tokens.New(tokens.Config{Prefix: "acme_download"}))
	body := good[:len(good)-6]
	above := new(big.Int).Lsh(big.NewInt(1), 256) // the first number that is not 32 bytes
	return map[string]string{
		"empty":             "",
		"prefix only":       "acme_upload_",
		"spaces":            " " + good,
		"newline":           good + "\n",
		"upper case":        strings.ToUpper(good),
		"another prefix":    must(other.Token(must(tokens.Derive(testKey, "good")))).Reveal(),
		"part of prefix":    withChecksum("upload_" + body[len("acme_upload_"):]),
		"longer prefix":     withChecksum("x" + body),
		"shorter":           withChecksum(body[:len(body)-1]),
		"longer":            withChecksum(body + "0"),
		"above 256 bits":    withChecksum("acme_upload_" + above.Text(62)),
		"far above":         withChecksum("acme_upload_" + strings.Repeat("Z", 43)),
		"sign":              withChecksum("acme_upload_+" + body[len("acme_upload_")+1:]),
		"minus":             withChecksum("acme_upload_-" + body[len("acme_upload_")+1:]),
		"underscore":        withChecksum(body[:30] + "_" + body[31:]),
		"not a digit":       withChecksum(body[:30] + "." + body[31:]),
		"all zero":          withChecksum("acme_upload_" + strings.Repeat("0", 43)),
		"low entropy":       withChecksum("acme_upload_" + strings.Repeat("0", 30) + "correcthorse1"),
		"a sequence":        withChecksum("acme_upload_" + sequence(1).Text(62)),
		"checksum too high": body + "ZZZZZZ",
		"huge":              strings.Repeat("acme_upload_", 1<<16),
	}
}

// sequence is 32 bytes, each step more than the one before it.
func sequence(step int) *big.Int {
	b := make([]byte, 32)
	for i := range b {
		b[i] = byte(7 + i*step)
	}
	return new(big.Int).SetBytes(b)
}

func TestParse_RefusesMalformedTokens(t *testing.T) {
	t.Parallel()
	for why, text := range malformed(t) {
		t.Run(why, func(t *testing.T) {
			_, err := newStore(t).Parse(text)
			requireInvalid(t, err, "malformed")
		})
	}
}

func TestMalformedTokens_AreRefusedWithoutAQuery(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	for _, text := range malformed(t) {
		_, err := store.Consume(ctx, noSQL{t: t}, "upload", "ada", text)
		requireInvalid(t, err, "malformed")
		_, err = store.Inspect(ctx, noSQL{t: t}, "upload", "ada", text)
		requireInvalid(t, err, "malformed")
		_, err = present(store, "upload", "ada", text)
		requireInvalid(t, err, "malformed")
	}
}

func TestText_HasConstantLength(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	for i := range 2000 {
		sum := sha256.Sum256([]byte{byte(i), byte(i >> 8)})
		zeros := i % 9 // which make small numbers
		secret := append(make([]byte, zeros), sum[:32-zeros]...)
		text := must(store.Token(must(tokens.NewSecret(secret)))).Reveal()
		require.Len(t, text, len("acme_upload_")+49)
	}
}

func FuzzParse(f *testing.F) {
	store := newStore(f)
	good := must(store.Token(must(tokens.Derive(testKey, "good")))).Reveal()
	f.Add(good, []byte("0123456789"), uint(3), byte('x'))
	f.Add("", []byte{}, uint(0), byte(0))
	for _, v := range goldenVectors {
		f.Add(v.text, must(hexKey(v.secret)), uint(len(v.text)-1), byte('0'))
	}
	for _, text := range malformed(f) {
		f.Add(text, []byte(text), uint(len(text)), byte('_'))
	}
	f.Fuzz(func(t *testing.T, text string, seed []byte, at uint, c byte) {
		check := func(text string) {
			token, err := store.Parse(text)
			if err != nil {
				requireInvalid(t, err, "malformed")
				return
			}
			require.Equal(t, text, token.Reveal())
			require.Equal(t, token.Digest(), must(store.Parse(token.Reveal())).Digest())
			changed := []byte(text)
			if at %= uint(len(text)); changed[at] != c {
				changed[at] = c
				_, err := store.Parse(string(changed))
				requireInvalid(t, err, "malformed")
			}
		}
		check(text)
		check(withChecksum(text)) // past the checksum, which no fuzzer finds
		sum := sha256.Sum256(seed)
		secret, err := tokens.Derive(testKey, string(sum[:]))
		require.NoError(t, err)
		check(must(store.Token(secret)).Reveal())
	})
}
