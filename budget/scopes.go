package budget

import (
	"encoding"
	"encoding/hex"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
)

// Scopes declare the scopes of one kind. K is a string, an integer, a bool, a time.Time, a [16]byte
// (a UUID), a type with MarshalText and UnmarshalText, or a struct of these. Different keys have
// different scopes.
type Scopes[K comparable] struct {
	// Kind is the first part of each scope. It is not "claim". Required.
	Kind string

	// Limits are the limits of each charge that Charge makes.
	Limits []Limit

	// MustExist sets the MustExist of each charge and credit.
	MustExist bool
}

// Check returns the mistake of a declaration. Then its scopes are all "".
func (s Scopes[K]) Check() error {
	if err := checkScope("Scopes.Kind", s.Kind); err != nil {
		return err
	}
	if s.Kind == claimKind {
		return invalid("Scopes.Kind", "%q is that of package holds", s.Kind)
	}
	for i, l := range s.Limits {
		if err := l.check(index("Scopes.Limits", i, "")); err != nil {
			return err
		}
	}
	if wrong := unkeyed(reflect.TypeFor[K]()); wrong != "" {
		return invalid("Scopes", "a key cannot be made of %s: want a string, an integer, a bool, a time.Time, a [16]byte, a type with "+
			"MarshalText and UnmarshalText, or a struct of these", wrong)
	}
	return nil
}

// claimKind is the kind of the scopes of claims.
const claimKind = "claim"

// Prefix begins the scopes of this kind alone.
func (s Scopes[K]) Prefix() string { return escape.Replace(s.Kind) + "/" }

// Scope is "", which calls refuse, for an empty text in the key.
func (s Scopes[K]) Scope(key K) string {
	if s.Kind == "" || s.Kind == claimKind {
		return ""
	}
	var space [bounds.MaxScopeBytes]byte
	kind := appendEscaped(space[:0], s.Kind)
	b, ok := appendKey(kind, reflect.ValueOf(&key).Elem())
	if !ok { // only then is a copy of the key allocated
		moved := new(K)
		*moved = key
		if b, ok = appendTexts(kind, reflect.ValueOf(moved).Elem()); !ok {
			return ""
		}
	}
	return string(b)
}

// Parse inverts Scope. A scope of another kind is an *ArgumentError.
func (s Scopes[K]) Parse(scope string) (K, error) {
	var key, none K
	if err := checkScope("scope", scope); err != nil {
		return none, err
	}
	rest, ok := strings.CutPrefix(scope, s.Prefix())
	parts := strings.Split(rest, "/")
	if !ok || !takeKey(&parts, reflect.ValueOf(&key).Elem()) || len(parts) > 0 || s.Scope(key) != scope {
		return none, invalid("scope", "%q is not of the kind %q", scope, s.Kind)
	}
	return key, nil
}

// Charge makes a charge of the key's scope, with the declared limits.
func (s Scopes[K]) Charge(key K, amount int64) Charge {
	return Charge{Scope: s.Scope(key), Amount: amount, Limits: slices.Clone(s.Limits), MustExist: s.MustExist}
}

// Credit makes a credit of the key's scope.
func (s Scopes[K]) Credit(key K, amount int64) Credit {
	return Credit{Scope: s.Scope(key), Amount: amount, MustExist: s.MustExist}
}

var (
	marshaler   = reflect.TypeFor[encoding.TextMarshaler]()
	unmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// isText reports whether values of a type are written and read by methods of their own.
func isText(t reflect.Type) bool {
	return t.NumMethod() > 0 && t.Implements(marshaler) && reflect.PointerTo(t).Implements(unmarshaler)
}

// isUUID reports whether values of a type are 16 bytes.
func isUUID(t reflect.Type) bool {
	return t.Kind() == reflect.Array && t.Len() == 16 && t.Elem().Kind() == reflect.Uint8
}

// unkeyed names the part of a type that no key is made of.
func unkeyed(t reflect.Type) string {
	switch {
	case isText(t):
		return ""
	case t.Kind() != reflect.Struct:
		if k := t.Kind(); k == reflect.String || k >= reflect.Bool && k <= reflect.Uintptr || isUUID(t) {
			return ""
		}
		return t.String()
	case t.NumField() == 0:
		return t.String() + ", which has no fields"
	}
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			return t.String() + "." + f.Name + ", which is not exported"
		}
		if wrong := unkeyed(f.Type); wrong != "" {
			return wrong
		}
	}
	return ""
}

// appendKey appends "/" and the text of each part of a key. It is false for a key that has no
// scope, and where MarshalText is to be called, which would need the key on the heap.
func appendKey(b []byte, v reflect.Value) ([]byte, bool) {
	k := v.Kind()
	switch {
	case isText(v.Type()):
		return b, false
	case k == reflect.String:
		return appendEscaped(append(b, '/'), v.String()), v.Len() > 0
	case v.CanInt():
		return strconv.AppendInt(append(b, '/'), v.Int(), 10), true
	case v.CanUint():
		return strconv.AppendUint(append(b, '/'), v.Uint(), 10), true
	case k == reflect.Bool:
		return strconv.AppendBool(append(b, '/'), v.Bool()), true
	case isUUID(v.Type()):
		return appendUUID(append(b, '/'), v), true
	case k != reflect.Struct || v.NumField() == 0:
		return b, false
	}
	ok := true
	for i := 0; ok && i < v.NumField(); i++ {
		field := v.Field(i)
		if ok = field.CanSet(); ok {
			b, ok = appendKey(b, field)
		}
	}
	return b, ok
}

// appendTexts is appendKey of a key that is on the heap.
func appendTexts(b []byte, v reflect.Value) ([]byte, bool) {
	switch {
	case !v.CanSet():
		return b, false
	case isText(v.Type()):
		value := v.Interface()
		if at, ok := value.(time.Time); ok {
			value = at.UTC() // an instant has one scope, in whatever zone
		}
		text, err := value.(encoding.TextMarshaler).MarshalText()
		return appendEscaped(append(b, '/'), string(text)), err == nil && len(text) > 0
	case v.Kind() != reflect.Struct || v.NumField() == 0:
		return appendKey(b, v)
	}
	ok := true
	for i := 0; ok && i < v.NumField(); i++ {
		b, ok = appendTexts(b, v.Field(i))
	}
	return b, ok
}

// takeKey sets v from the first of the parts, and takes these away.
func takeKey(parts *[]string, v reflect.Value) bool {
	if v.Kind() == reflect.Struct && !isText(v.Type()) {
		ok := true
		for i := 0; ok && i < v.NumField(); i++ {
			ok = takeKey(parts, v.Field(i))
		}
		return ok
	}
	if len(*parts) == 0 || !v.CanSet() {
		return false
	}
	text := unescape.Replace((*parts)[0])
	*parts = (*parts)[1:]
	var err error
	switch {
	case isText(v.Type()):
		err = v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text))
	case v.Kind() == reflect.String:
		v.SetString(text)
	case v.CanInt():
		var n int64
		n, err = strconv.ParseInt(text, 10, v.Type().Bits())
		v.SetInt(n)
	case v.CanUint():
		var n uint64
		n, err = strconv.ParseUint(text, 10, v.Type().Bits())
		v.SetUint(n)
	case v.Kind() == reflect.Bool:
		var is bool
		is, err = strconv.ParseBool(text)
		v.SetBool(is)
	case isUUID(v.Type()):
		var b []byte
		if b, err = hex.DecodeString(strings.ReplaceAll(text, "-", "")); err != nil || len(b) != v.Len() {
			return false
		}
		reflect.Copy(v, reflect.ValueOf(b))
	default:
		return false
	}
	return err == nil
}

// appendUUID appends 16 bytes as a UUID is written.
func appendUUID(b []byte, v reflect.Value) []byte {
	for i := range v.Len() {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			b = append(b, '-')
		}
		b = hex.AppendEncode(b, []byte{byte(v.Index(i).Uint())})
	}
	return b
}

// appendEscaped appends an escaped text.
func appendEscaped(b []byte, text string) []byte {
	for i := range len(text) {
		switch text[i] {
		case '%':
			b = append(b, "%25"...)
		case '/':
			b = append(b, "%2F"...)
		default:
			b = append(b, text[i])
		}
	}
	return b
}
