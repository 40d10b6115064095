package holds

import (
	"strings"

	"github.com/pgmetered/metered/budget"
)

// LineOf is a line of a declared kind, with limits.
func LineOf[K comparable](kind budget.Scopes[K], key K, amount int64) Line {
	c := kind.Charge(key, amount)
	return Line{Scope: c.Scope, Amount: amount, Limits: c.Limits, MustExist: c.MustExist}
}

// ClaimOf is a claim of a declared kind. Set its Holder and TTL.
func ClaimOf[K comparable](kind budget.Scopes[K], key K) Claim {
	value := strings.TrimPrefix(kind.Scope(key), kind.Prefix())
	return Claim{Key: Key{Type: kind.Kind, Value: value}, MustExist: kind.MustExist}
}

// ParseKey inverts ClaimOf. Another kind's key is a *budget.ArgumentError.
func ParseKey[K comparable](kind budget.Scopes[K], key Key) (K, error) {
	if key.Type != kind.Kind {
		var none K
		return none, invalid("Key.Type", "%q is not of the kind %q", key.Type, kind.Kind)
	}
	return kind.Parse(kind.Prefix() + key.Value)
}
