package budget

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxScopeBytes is the longest scope, in bytes of UTF-8.
const MaxScopeBytes = 255

// ScopeKey builds the scope of a typed key: a kind ("seat"), a key ("21A") and a
// slot ("2026-11-21T20:00"), which may be empty where time is no part of what is
// limited. Different parts give different scopes whatever they contain: "/" and
// "%" inside a part are escaped, so that parts cannot run into each other. It is
// an *ArgumentError if kind or key is empty, a part is not UTF-8 or contains a
// zero byte, or the scope would be longer than MaxScopeBytes.
//
// Put the tenant into the key, or in front of the kind with a scope of your own
// making: the ledger knows no tenants.
func ScopeKey(kind, key, slot string) (string, error) {
	if kind == "" {
		return "", invalid("kind", "is empty")
	}
	if key == "" {
		return "", invalid("key", "is empty")
	}
	scope := escape.Replace(kind) + "/" + escape.Replace(key)
	if slot != "" {
		scope += "/" + escape.Replace(slot)
	}
	if err := checkScope("scope", scope); err != nil {
		return "", err
	}
	return scope, nil
}

// SplitScope is the inverse of ScopeKey. A scope that ScopeKey cannot have built
// is an *ArgumentError.
func SplitScope(scope string) (kind, key, slot string, err error) {
	parts := strings.Split(scope, "/")
	if len(parts) < 2 || len(parts) > 3 {
		return "", "", "", invalid("scope", "%q does not have two or three parts", scope)
	}
	for i, p := range parts {
		parts[i] = unescape.Replace(p)
	}
	if len(parts) == 2 {
		parts = append(parts, "")
	} else if parts[2] == "" {
		return "", "", "", invalid("scope", "%q has an empty slot", scope)
	}
	if built, err := ScopeKey(parts[0], parts[1], parts[2]); err != nil || built != scope {
		return "", "", "", invalid("scope", "%q was not built by ScopeKey", scope)
	}
	return parts[0], parts[1], parts[2], nil
}

var (
	escape   = strings.NewReplacer("%", "%25", "/", "%2F")
	unescape = strings.NewReplacer("%25", "%", "%2F", "/")
)

func checkScope(field, scope string) error {
	if scope == "" {
		return invalid(field, "is empty")
	}
	return checkText(field, scope, MaxScopeBytes)
}

// checkText refuses what Postgres cannot store as text, or is too long.
func checkText(field, text string, maxBytes int) error {
	switch {
	case len(text) > maxBytes:
		return invalid(field, "is %d bytes long, want at most %d", len(text), maxBytes)
	case !utf8.ValidString(text):
		return invalid(field, "is not valid UTF-8")
	case strings.IndexByte(text, 0) >= 0:
		return invalid(field, "contains a zero byte")
	}
	return nil
}

// index names an element of an argument, "charges[2].Scope".
func index(list string, i int, field string) string {
	return fmt.Sprintf("%s[%d]%s", list, i, field)
}
