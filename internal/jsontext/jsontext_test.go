package jsontext_test

import (
	"encoding/json"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/jsontext"
)

type (
	named    string
	bytesOf  []byte // encoded as text
	spelled  struct{}
	grade    byte // its text is that one byte
	id       [2]byte
	fields   struct{ A, B any }
	embedded struct{ Text string }
	quoted   struct {
		Text string `json:",string"`
		Same string
	}
	left struct {
		Kept   string
		Hidden string `json:"-"`
		own    string
	}
	promoted struct {
		embedded
		*left
	}
	custom struct {
		Text string
		Raw  json.RawMessage
		Sum  id
		sum  []byte
		up   *custom
	}
	byPointer struct{ text string }
	holder    struct{ V byPointer }
	chosen    struct {
		A json.Marshaler
		B *string
	}
)

func (b bytesOf) MarshalJSON() ([]byte, error) { return json.Marshal(string(b)) }
func (spelled) MarshalJSON() ([]byte, error)   { return []byte(`"\uFFFD"`), nil }
func (g grade) MarshalText() ([]byte, error)   { return []byte{byte(g)}, nil }
func (i id) MarshalText() ([]byte, error) {
	return []byte(netip.AddrFrom4([4]byte{1, 2, i[0], i[1]}).String()), nil
}
func (p *byPointer) MarshalJSON() ([]byte, error) { return json.Marshal(p.text) }
func (c custom) MarshalJSON() ([]byte, error) {
	type own custom
	return json.Marshal(struct {
		own
		More string
	}{own(c), "more"})
}

// made returns a value with text at each place that encoding/json takes text from.
func made(text string) map[string]any {
	return map[string]any{
		"string": text, "named": named(text), "pointer": &text, "slice": []string{"", text}, "array": [1]any{text},
		"value": map[int]string{1: text}, "key": map[string]int{text: 1}, "named key": map[named]int{named(text): 1},
		"field": fields{1, text}, "deep": []any{&fields{nil, map[string]any{"x": []named{named(text)}}}},
		"embedded": promoted{embedded{text}, nil}, "embedded pointer": promoted{left: &left{Kept: text}},
		"quoted": quoted{text, ""}, "raw beside": fields{json.RawMessage(`"\ufffd"`), text},
		"bytes": bytesOf(text), "bytes in a field": fields{B: bytesOf(text)}, "pointer's method": &byPointer{text}, "addressed": &holder{byPointer{text}},
		"custom": custom{Text: text}, "custom pointer": []*custom{{Text: text}}, "dynamic": chosen{A: bytesOf(text)},
	}
}

func TestCheck_RefusesTextThatIsNotUTF8(t *testing.T) {
	t.Parallel()
	for what, v := range made("a\xffb") {
		encoded, other := encode(t, v), encode(t, made("a\xfeb")[what])
		require.Equal(t, string(encoded), string(other), what)
		require.Error(t, jsontext.Check(v, encoded), what)
	}
	for what, v := range map[string]any{
		"text": grade(0xff), "text as a key": map[grade]int{0xff: 1}, "text in a slice": []grade{0xff},
		"raw": json.RawMessage("\"\xff\""),
	} {
		require.Error(t, jsontext.Check(v, encode(t, v)), what)
	}
}

func TestCheck_AllowsTheReplacementCharacterItself(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "a\ufffdb", `\ufffd`, `\\ufffd`, "\ufffe", "😀"} {
		for what, v := range made(text) {
			require.NoError(t, jsontext.Check(v, encode(t, v)), "%s of %q", what, text)
		}
	}
	cycle := &custom{Text: "\ufffd"}
	cycle.up = cycle
	for what, v := range map[string]any{
		"nil": nil, "nil pointer": (*custom)(nil), "nil in it": chosen{}, "nil with methods": []*byPointer{nil}, "numbers": fields{1.5, big.NewInt(7)},
		"raw": json.RawMessage(`{"a":"\ufffd"}`), "raw pointer": &json.RawMessage{'1'}, "raw in a field": fields{json.RawMessage(`"\ufffd"`), "\ufffd"},
		"spelled":         []any{spelled{}, "\ufffd"},
		"left out":        fields{left{"\ufffd", "\xff", "\xff"}, "\ufffd"},
		"bytes in base64": fields{[]byte("\xff"), "\ufffd"},
		"custom":          custom{Text: "\ufffd", Raw: json.RawMessage(`"\ufffd"`), Sum: id{0xff, 0xfe}, sum: []byte("\xff\xfe")},
		"cycle":           cycle, "time": fields{time.Now(), "\ufffd"},
		"long": strings.Repeat("\ufffd", 1<<16),
	} {
		require.NoError(t, jsontext.Check(v, encode(t, v)), what)
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	encoded, err := json.Marshal(v)
	require.NoError(t, err)
	return encoded
}
