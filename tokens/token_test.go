package tokens_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/tokens"
)

var verbs = []string{"%v", "%+v", "%#v", "%s", "%q", "%+q", "%x", "%X", "% x", "%d", "%p", "%t", "%c", "%e", "%U", "%60s", "%.5s", "%!", "%T"}

// everyPrinting is v in all the ways a program prints things by mistake.
func everyPrinting(t *testing.T, v any) string {
	t.Helper()
	var out bytes.Buffer
	for _, verb := range verbs {
		fmt.Fprintf(&out, verb+"\n", v)
	}
	wrapped := "wrapped as if it were an error: %w" // a variable, because vet would see the mistake
	fmt.Fprintln(&out, v, fmt.Errorf(wrapped, v))
	for _, handler := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(handler).Info("x", "value", v, slog.Group("g", "nested", v))
	}
	encoded, err := json.Marshal(v)
	require.NoError(t, err)
	out.Write(encoded)
	return out.String()
}

func TestToken_IsRedactedHoweverItIsPrinted(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	secret, err := tokens.Derive(testKey, "redaction")
	require.NoError(t, err)
	token, err := store.Token(secret)
	require.NoError(t, err)
	text := token.Reveal()

	type nested struct {
		Exported   tokens.Token
		hidden     tokens.Token // fmt does not ask such a field how to print it
		Pointer    *tokens.Token
		pointer    *tokens.Token
		Secret     tokens.Secret
		secret     tokens.Secret
		Any        any
		Slice      []tokens.Token
		Minted     tokens.Minted
		interface_ fmt.Stringer
	}
	minted := tokens.Minted{Token: token, Digest: token.Digest()}
	deep := nested{token, token, &token, &token, secret, secret, token, []tokens.Token{token}, minted, token}

	raw := fmt.Sprintf("%x", rawSecret(t, text))
	for _, v := range []any{token, &token, secret, &secret, deep, &deep, minted, &minted,
		map[string]tokens.Token{"k": token}, []any{token, &deep}, [1]tokens.Secret{secret}} {
		printed := everyPrinting(t, v)
		require.NotContains(t, printed, text)
		// Nor any run of it that would help: nor as hex, nor as a list of bytes.
		body := text[len("acme_upload_"):]
		for i := 0; i+8 <= len(body); i++ {
			require.NotContains(t, printed, body[i:i+8])
			require.NotContains(t, strings.ToLower(printed), fmt.Sprintf("%x", body[i:i+8]))
		}
		for i := 0; i+8 <= len(raw); i++ {
			require.NotContains(t, strings.ToLower(printed), raw[i:i+8])
		}
		require.NotContains(t, printed, strings.Trim(fmt.Sprint(rawSecret(t, text)[:4]), "[]"))
	}

	for _, verb := range verbs[:9] {
		require.Equal(t, "acme_upload_REDACTED", fmt.Sprintf(verb, token), verb)
		require.Equal(t, "REDACTED", fmt.Sprintf(verb, secret), verb)
	}
	require.Equal(t, "acme_upload_REDACTED", token.String())
	require.Equal(t, "acme_upload_REDACTED", token.GoString())
	require.Equal(t, "REDACTED", secret.String()+secret.GoString()[8:])
	require.Equal(t, "acme_upload_REDACTED", token.LogValue().String())

	asJSON, err := json.Marshal(map[string]any{"token": token, "secret": secret})
	require.NoError(t, err)
	require.JSONEq(t, `{"token": "acme_upload_REDACTED", "secret": "REDACTED"}`, string(asJSON))
	type envelope struct{ Token tokens.Token }
	asXML, err := xml.Marshal(envelope{token}) // by MarshalText
	require.NoError(t, err)
	require.Contains(t, string(asXML), "<Token>acme_upload_REDACTED</Token>")
	asText, err := secret.MarshalText()
	require.NoError(t, err)
	require.Equal(t, "REDACTED", string(asText))
}

func TestToken_ZeroIsNoToken(t *testing.T) {
	t.Parallel()
	var token tokens.Token
	require.Empty(t, token.Reveal())
	require.Equal(t, "REDACTED", fmt.Sprint(token))
	_, err := newStore(t).Parse(token.Reveal())
	requireInvalid(t, err, "malformed")

	_, err = newStore(t).Token(tokens.Secret{})
	requireArgument(t, err, "Secret")
}

func TestDigest_IsHexadecimalText(t *testing.T) {
	t.Parallel()
	token := must(newStore(t).Token(must(tokens.Derive(testKey, "1"))))
	digest := token.Digest()
	encoded, err := json.Marshal(digest)
	require.NoError(t, err)
	require.Equal(t, `"`+digest.String()+`"`, string(encoded))

	var back tokens.Digest
	require.NoError(t, json.Unmarshal(encoded, &back))
	require.Equal(t, digest, back)
	for _, bad := range []string{"", digest.String()[1:], digest.String() + "0", "g" + digest.String()[1:]} {
		requireArgument(t, back.UnmarshalText([]byte(bad)), "Digest")
		require.Equal(t, digest, back, "a failure changed it")
	}
}

func TestInvalidError_LooksTheSameForEveryReason(t *testing.T) {
	t.Parallel()
	_, err := newStore(t).Parse("nonsense")
	var invalid *tokens.InvalidError
	require.True(t, errors.As(err, &invalid))
	require.Equal(t, "malformed", invalid.Reason())

	printed := everyPrinting(t, invalid)
	require.NotContains(t, printed, "malformed")
	type response struct {
		Error error
		inner *tokens.InvalidError
		value tokens.InvalidError
	}
	require.NotContains(t, everyPrinting(t, response{err, invalid, *invalid}), "malformed")
	require.NotContains(t, everyPrinting(t, *invalid), "malformed")

	encoded, err := json.Marshal(response{Error: invalid})
	require.NoError(t, err)
	require.JSONEq(t, `{"Error": "tokens: the token is not valid"}`, string(encoded))
	require.Equal(t, "", (&tokens.InvalidError{}).Reason())
}
