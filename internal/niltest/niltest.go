// Package niltest calls the exported functions and methods of a package with nil arguments.
package niltest

import (
	"context"
	"errors"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/fault"
)

// Given is an argument that may be nil, or that no caller leaves out: it is passed as it is.
type Given struct{ Arg any }

// Methods calls each exported method of made, a pointer as New returns it, with one argument nil at
// a time. It also calls all of them on the zero value and on nil. A method that returns an error
// must return a *fault.Argument. None may panic, except a method without an error on nil.
//
// args has the arguments of each method after its context, as in a correct call. A missing method
// fails the test.
func Methods(t *testing.T, made any, args map[string][]any) {
	t.Helper()
	receiver := reflect.ValueOf(made)
	for i := range receiver.NumMethod() {
		name := receiver.Type().Method(i).Name
		with, ok := args[name]
		if !ok {
			t.Errorf("%s: give its arguments to niltest.Methods", name)
			continue
		}
		Func(t, name, receiver.Method(i).Interface(), with...)
		zero := reflect.New(receiver.Type().Elem())
		refused(t, name+" of the zero value", zero.Method(i), arguments(zero.Method(i), with), "was not made by New")
		if returnsError(zero.Method(i)) {
			refused(t, name+" of nil", reflect.Zero(receiver.Type()).Method(i), arguments(zero.Method(i), with), "was not made by New")
		}
	}
}

// Func calls f, a function that returns an error, with one of args nil at a time. args are as
// for Methods.
func Func(t *testing.T, name string, f any, args ...any) {
	t.Helper()
	fn := reflect.ValueOf(f)
	in := arguments(fn, args)
	for i, arg := range args {
		at := len(in) - len(args) + i
		if _, given := arg.(Given); given {
			continue
		}
		var nils []reflect.Value
		switch kind := in[at].Kind(); kind {
		case reflect.Interface, reflect.Pointer, reflect.Func:
			nils = append(nils, reflect.Zero(in[at].Type()))
			for _, pointer := range []any{(*pgxpool.Pool)(nil), (*pgxpool.Tx)(nil)} { // in an interface
				if p := reflect.ValueOf(pointer); kind == reflect.Interface && p.Type().Implements(in[at].Type()) {
					nils = append(nils, p.Convert(in[at].Type()))
				}
			}
		}
		for _, none := range nils {
			with := append([]reflect.Value(nil), in...)
			with[at] = none
			refused(t, name+" with "+none.String(), fn, with, "is nil")
		}
	}
}

// arguments are args as values for fn, after a context if fn takes one first.
func arguments(fn reflect.Value, args []any) []reflect.Value {
	var in []reflect.Value
	if fn.Type().NumIn() > 0 && fn.Type().In(0) == reflect.TypeFor[context.Context]() {
		in = append(in, reflect.ValueOf(context.Background()))
	}
	for _, arg := range args {
		if given, ok := arg.(Given); ok {
			arg = given.Arg
		}
		want := fn.Type().In(min(len(in), fn.Type().NumIn()-1))
		if fn.Type().IsVariadic() && len(in) >= fn.Type().NumIn()-1 {
			want = want.Elem()
		}
		v := reflect.New(want).Elem()
		if arg != nil {
			v.Set(reflect.ValueOf(arg))
		}
		in = append(in, v)
	}
	return in
}

var errorType = reflect.TypeFor[error]()

// returnsError reports whether fn returns an error at last, or a sequence that has one.
func returnsError(fn reflect.Value) bool {
	n := fn.Type().NumOut()
	if n == 0 {
		return false
	}
	last := fn.Type().Out(n - 1)
	return last == errorType || last.Kind() == reflect.Func && last.CanSeq2()
}

func refused(t *testing.T, what string, fn reflect.Value, in []reflect.Value, reason string) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("%s panics: %v", what, r)
		}
	}()
	out := fn.Call(in)
	if !returnsError(fn) {
		return
	}
	last := out[len(out)-1]
	if last.Type() != errorType {
		for _, last = range last.Seq2() {
			break
		}
	}
	err, _ := last.Interface().(error)
	var argument *fault.Argument
	if !errors.As(err, &argument) || argument.Reason != reason {
		t.Errorf("%s: got %v, want an argument that %s", what, err, reason)
		return
	}
	require.NotEmpty(t, argument.Field, what)
}
