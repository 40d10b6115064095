package budget

import (
	"fmt"
	"strings"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
)

// ScopeKey builds the scope of a kind ("seat"), a key ("21A") and a slot ("2026-11-21T20:00"),
// which may be empty. Different parts give different scopes: "/" and "%" are escaped. Calls refuse
// an empty kind or key.
func ScopeKey(kind, key, slot string) string {
	if kind == "" || key == "" {
		return ""
	}
	scope := escape.Replace(kind) + "/" + escape.Replace(key)
	if slot != "" {
		scope += "/" + escape.Replace(slot)
	}
	return scope
}

// splitScope inverts ScopeKey. Other scopes are an *ArgumentError.
func splitScope(scope string) (kind, key, slot string, err error) {
	if err := checkScope("scope", scope); err != nil {
		return "", "", "", err
	}
	parts := append(strings.SplitN(scope, "/", 3), "", "")
	for i, p := range parts {
		parts[i] = unescape.Replace(p)
	}
	if ScopeKey(parts[0], parts[1], parts[2]) != scope {
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
	return checkText(field, scope, bounds.MaxScopeBytes)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// checkText refuses a text that Postgres cannot store, or that is too long.
func checkText(field, text string, maxBytes int) error {
	return fault.Text(errArgument, field, text, maxBytes)
}

// located puts the name of the list's element before the field of a refused argument. Names are
// made where one is refused: to make them for each charge would take longer than to check it.
func located(list string, i int, err error) error {
	if err != nil {
		return within(index(list, i, ""), err)
	}
	return nil
}

func within(where string, err error) error {
	if a, ok := err.(*ArgumentError); ok { // just made: nothing wraps it
		return invalid(where+a.Field, "%s", a.Reason)
	}
	return err
}

// index names an element of an argument, "charges[2].Scope".
func index(list string, i int, field string) string {
	return fmt.Sprintf("%s[%d]%s", list, i, field)
}
