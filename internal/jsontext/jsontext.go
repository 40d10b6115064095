// Package jsontext refuses values that JSON cannot tell apart.
package jsontext

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"reflect"
	"unicode/utf8"
)

var errNotUTF8 = errors.New("has text that is not UTF-8, which JSON cannot hold")

// Check refuses encoded, which encoding/json made of v, if text of v was lost in it. For each byte
// that is not UTF-8 encoding/json writes U+FFFD, so "a\xff" and "a\xfe" come out equal.
//
// encoded alone does not show that: a U+FFFD in it can be v's own. If there is one, Check walks v
// by the rules of encoding/json: its strings, its map keys and the results of its MarshalText
// methods must be UTF-8. A json.RawMessage is encoded as it is. The inside of another MarshalJSON
// cannot be seen. So if its output has a U+FFFD, all strings inside the value must be UTF-8,
// whether it encodes them or not, and bytes only where the output has them as text.
func Check(v any, encoded []byte) error {
	if utf8.Valid(encoded) && (!replaced(encoded) || !newWalk(nil).broken(reflect.ValueOf(v))) {
		return nil
	}
	return errNotUTF8
}

// replaced reports whether a byte may have been replaced: by an escape, or by the character
// itself where encoding/json is built on its version 2.
func replaced(encoded []byte) bool {
	return bytes.Contains(encoded, []byte(`\ufffd`)) || bytes.Contains(encoded, []byte("\ufffd"))
}

// walk looks for text that is not UTF-8.
type walk struct {
	output []byte // of the MarshalJSON around the value, or nil
	seen   map[visit]bool
}

type visit struct {
	what reflect.Type
	at   uintptr
	size int
}

func newWalk(output []byte) *walk { return &walk{output, map[visit]bool{}} }

func (w *walk) broken(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Invalid:
		return false
	case reflect.Interface:
		return w.broken(v.Elem())
	case reflect.Pointer:
		if v.IsNil() {
			return false
		}
	}
	if v.Type() == reflect.TypeFor[json.RawMessage]() {
		return false
	}
	if m, ok := as[json.Marshaler](v); ok && w.output == nil {
		output, err := m.MarshalJSON()
		if err != nil || !replaced(output) {
			return err != nil
		}
		return newWalk(output).inside(reflect.Indirect(v))
	}
	if m, ok := as[encoding.TextMarshaler](v); ok {
		text, err := m.MarshalText()
		return err != nil || !utf8.Valid(text)
	}
	return w.inside(v)
}

// inside is broken without v's own methods.
func (w *walk) inside(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.String:
		return !utf8.ValidString(v.String())
	case reflect.Pointer:
		return w.enter(v, 1) && w.broken(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			omitted := !field.IsExported() && !field.Anonymous || field.Tag.Get("json") == "-"
			if (w.output != nil || !omitted) && w.broken(v.Field(i)) {
				return true
			}
		}
	case reflect.Map:
		if !w.enter(v, v.Len()) {
			return false
		}
		for entries := v.MapRange(); entries.Next(); {
			key := entries.Key()
			if key.Kind() == reflect.String && w.inside(key) || key.Kind() != reflect.String && w.broken(key) || w.broken(entries.Value()) {
				return true
			}
		}
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && !w.enter(v, v.Len()) {
			return false
		}
		if w.output != nil && v.Type().Elem().Kind() == reflect.Uint8 {
			return w.shown(v)
		}
		for i := range v.Len() {
			if w.broken(v.Index(i)) {
				return true
			}
		}
	}
	return false
}

// enter reports whether w meets the target of v for the first time.
func (w *walk) enter(v reflect.Value, size int) bool {
	at := visit{v.Type(), uintptr(v.UnsafePointer()), size}
	defer func() { w.seen[at] = true }()
	return !w.seen[at]
}

// shown reports whether bytes that are not UTF-8 are in the output as text.
func (w *walk) shown(v reflect.Value) bool {
	b := make([]byte, v.Len())
	for i := range b {
		b[i] = byte(v.Index(i).Uint())
	}
	if utf8.Valid(b) {
		return false
	}
	text, err := json.Marshal(string(b))
	return err != nil || bytes.Contains(w.output, text[1:len(text)-1])
}

// as returns v, or the pointer to it, as an M: where encoding/json would call its method.
func as[M any](v reflect.Value) (m M, ok bool) {
	if !v.CanInterface() {
		return m, false
	}
	if m, ok = v.Interface().(M); !ok && v.CanAddr() {
		m, ok = v.Addr().Interface().(M)
	}
	return m, ok
}
