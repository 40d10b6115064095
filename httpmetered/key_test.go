package httpmetered_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/fault"
)

func keyOf(fields ...string) (string, error) {
	return httpmetered.Key(&http.Request{Header: http.Header{"Idempotency-Key": fields}})
}

func TestKey_IsAStringOfStructuredFieldsOrBare(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 255)
	for field, want := range map[string]string{
		"8e03978e-40d5-43dd-bc93-6894a57f9324":   "8e03978e-40d5-43dd-bc93-6894a57f9324",
		`"8e03978e-40d5-43dd-bc93-6894a57f9324"`: "8e03978e-40d5-43dd-bc93-6894a57f9324",
		" \"k\"\t":                               "k",
		`"a key, with \"\\; in it"`:              `a key, with "\; in it`,
		"a+/=:k":                                 "a+/=:k",
		`"k";a`:                                  "k",
		`"k"; a=1;*b_.-*=-1.25;c="q\"; \\";d=tok/en:1;e=:AQ==:;f=?0;g=@-3;h=%"f%c3%bc"`: "k",
		long:                                  long,
		`"` + long + `"`:                      long,
		`"` + strings.Repeat(`\"`, 255) + `"`: strings.Repeat(`"`, 255),
	} {
		got, err := keyOf(field)
		require.NoError(t, err, field)
		require.Equal(t, want, got)
	}
}

func TestKey_RefusesInvalidKeys(t *testing.T) {
	t.Parallel()
	_, err := keyOf()
	require.ErrorIs(t, err, fault.New("idempotency_key_missing", ""))
	_, err = httpmetered.Key(&http.Request{})
	require.ErrorIs(t, err, fault.New("idempotency_key_missing", ""))
	long := strings.Repeat("k", 255+1)
	for _, fields := range [][]string{
		{""}, {" "}, {`""`}, {`"`}, {`"k`}, {`k"`}, {`"k""`}, {`"k";`}, {`"k" ;a`}, {`"k";A=1`}, {`"k";a=`}, {`"k";a =1`}, {`"k";a=1,`}, {`"k";a="`}, {`"k";a=1.`}, {`"k";a=?2`}, {`"k", "l"`}, {"k, l"}, {"k,l"}, {"k;a"}, {"a b"},
		{`"\k"`}, {`"k\"`}, {`"k\`}, {`a\b`}, {"a\x00b"}, {"a\x7fb"}, {"\"a\nb\""}, {"\"a\tb\""}, {"clé"}, {`"clé"`}, {"a\xff"},
		{long}, {`"` + long + `"`}, {strings.Repeat("k", 10<<10)}, {"k", "k"}, {"k", ""},
	} {
		_, err := keyOf(fields...)
		require.ErrorIs(t, err, fault.New("idempotency_key_invalid", ""), "%q", fields)
		_, err = httpmetered.OptionalKey(&http.Request{Header: http.Header{"Idempotency-Key": fields}})
		require.ErrorIs(t, err, fault.New("idempotency_key_invalid", ""), "%q", fields)
	}
}

func TestOptionalKey_MakesOneWhereThereIsNone(t *testing.T) {
	t.Parallel()
	a, err := httpmetered.OptionalKey(&http.Request{})
	require.NoError(t, err)
	b, err := httpmetered.OptionalKey(&http.Request{})
	require.NoError(t, err)
	require.NotEqual(t, a, b)
	k, err := httpmetered.OptionalKey(&http.Request{Header: http.Header{"Idempotency-Key": {"k"}}})
	require.NoError(t, err)
	require.Equal(t, "k", k)
}
