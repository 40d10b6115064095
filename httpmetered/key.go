package httpmetered

import (
	"errors"
	"net/http"
	"regexp"
	"strings"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/fault"
)

// maxIdempotencyKeyBytes bounds an Idempotency-Key without its quotes, as an operation's id is
// bounded.
const maxIdempotencyKeyBytes = 255

// Faults of an Idempotency-Key.
var (
	errKeyMissing error = fault.New("idempotency_key_missing", "httpmetered: the request has no Idempotency-Key")
	errKeyInvalid error = fault.New("idempotency_key_invalid", "httpmetered: the Idempotency-Key cannot be used")
	errInFlight   error = fault.New("idempotency_key_in_flight", "httpmetered: another request with the Idempotency-Key is being carried out")
)

const fieldKey = "Idempotency-Key"

// Key returns the Idempotency-Key of a request, for the ID of a command: 1 to 255 printable ASCII
// characters, quoted, or bare without spaces and ,";\. Both are the same key. Its errors have the
// codes idempotency_key_missing and idempotency_key_invalid, also for several fields.
func Key(r *http.Request) (string, error) {
	values := r.Header.Values(fieldKey)
	switch len(values) {
	case 0:
		return "", errKeyMissing
	case 1:
	default:
		return "", errKeyInvalid
	}
	key, ok := parseKey(strings.Trim(values[0], " \t"))
	if !ok || key == "" || len(key) > maxIdempotencyKeyBytes {
		return "", errKeyInvalid
	}
	return key, nil
}

// OptionalKey is Key, or an id of its own for a request without one.
func OptionalKey(r *http.Request) (string, error) {
	key, err := Key(r)
	if errors.Is(err, errKeyMissing) {
		return metered.NewID(), nil
	}
	return key, err
}

// parameters are those of an Item of RFC 9651, 4.2.3.2, with Bare Items of each kind. None means
// anything here.
var parameters = regexp.MustCompile(`^(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:` + strings.Join([]string{
	`-?[0-9]{1,15}`, `-?[0-9]{1,12}\.[0-9]{1,3}`, `"(?:[ !#-\[\]-~]|\\["\\])*"`, "[A-Za-z*][!#-'*+.^_`|~0-9A-Za-z:/-]*", `:[A-Za-z0-9+/=]*:`,
	`\?[01]`, `@-?[0-9]{1,15}`, `%"(?:[ !#$&-~]|%[0-9a-f]{2})*"`,
}, "|") + `))?)*$`)

// parseKey reads a String of RFC 9651, 4.2.5, with parameters or without, or a bare key.
func parseKey(field string) (key string, ok bool) {
	inner, quoted := strings.CutPrefix(field, `"`)
	if !quoted {
		for i := range len(field) {
			if c := field[i]; c <= ' ' || c > '~' || strings.IndexByte(`,;"\`, c) >= 0 {
				return "", false
			}
		}
		return field, true
	}
	var b strings.Builder
	for i := 0; i < len(inner); i++ {
		switch c := inner[i]; {
		case c == '"':
			return b.String(), parameters.MatchString(inner[i+1:])
		case c == '\\':
			if i++; i == len(inner) || inner[i] != '"' && inner[i] != '\\' {
				return "", false
			}
		case c < ' ' || c > '~':
			return "", false
		}
		b.WriteByte(inner[i])
	}
	return "", false
}
