package httpmetered

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/pgmetered/metered/internal/fault"
)

// errAnswer says that a handler gave no answer, or one too large, in parts, or with a cookie.
// Nothing was committed.
var errAnswer error = fault.New("answer_unrecordable", "httpmetered: the handler's answer cannot be recorded")

// answer is a handler's answer, as a command's result.
type answer struct {
	Status int         `json:"status"`
	Header http.Header `json:"header,omitempty"`
	Text   string      `json:"text,omitempty"` // the body, where it is text, so that people can read the record
	Bytes  []byte      `json:"bytes,omitempty"`

	tenant, id string // of its operation
}

func (a *answer) write(w http.ResponseWriter, replayed bool) {
	addShown(w.Header(), a.Header, replayed)
	for name, values := range a.Header {
		if name != fieldPolicy && name != fieldLimit {
			w.Header()[name] = values
		}
	}
	w.WriteHeader(a.Status)
	if len(a.Bytes) > 0 {
		_, _ = w.Write(a.Bytes)
	} else if a.Text != "" {
		_, _ = w.Write([]byte(a.Text)) // it fails if the client has gone
	}
}

// undone is the error of a function whose handler answered with a failure. Do unwraps the error
// that the handler gave to Write, so that it knows whether to repeat.
type undone struct {
	answer answer
	cause  error
}

func (e *undone) Error() string {
	if e.cause != nil {
		return e.cause.Error()
	}
	return fmt.Sprintf("httpmetered: the handler answered %d", e.answer.Status)
}

func (e *undone) Unwrap() error { return e.cause }

// recorder keeps an answer until its command has committed. It cannot flush, be hijacked, or send
// interim answers (1xx).
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
	max    int
	cause  error // the error that the handler gave to Write
	broken error
	sent   http.Header // header, when the status was written
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status != 0 || status >= 100 && status < 200 {
		return
	}
	if status < 200 || status > 999 { // as net/http does
		panic(fmt.Sprintf("httpmetered: invalid status %d", status))
	}
	r.status, r.sent = status, r.header.Clone()
}

func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	switch {
	case r.status == http.StatusNoContent || r.status == http.StatusNotModified:
		return 0, http.ErrBodyNotAllowed
	case r.body.Len()+len(b) > r.max:
		r.broken = fmt.Errorf("%w: its body is larger than %d bytes", errAnswer, r.max)
		return 0, r.broken
	}
	return r.body.Write(b)
}

// perConnection are fields about a connection and not about an answer: net/http sets them anew.
var perConnection = []string{"Connection", "Keep-Alive", "Content-Length", "Date",
	"Proxy-Connection", "Te", "Transfer-Encoding", "Upgrade"}

// answer is the recorded answer, or errAnswer.
func (r *recorder) answer() (answer, error) {
	switch {
	case r.broken != nil:
		return answer{}, r.broken
	case r.status == 0:
		return answer{}, fmt.Errorf("%w: the handler returned without one", errAnswer)
	}
	a := answer{Status: r.status, Header: r.sent}
	for name := range r.header { // with headers set after the body: trailers
		if name == "Set-Cookie" || name == "Trailer" || strings.HasPrefix(name, http.TrailerPrefix) {
			return answer{}, fmt.Errorf("%w: it has %s", errAnswer, name)
		}
	}
	for _, name := range perConnection {
		delete(a.Header, name)
	}
	size := 0
	for name, values := range a.Header {
		for _, value := range values {
			if size += len(name) + len(value); !utf8.ValidString(value) {
				return answer{}, fmt.Errorf("%w: the field %s is not UTF-8", errAnswer, name)
			}
		}
	}
	if size > maxFieldBytes {
		return answer{}, fmt.Errorf("%w: its fields are larger than %d bytes", errAnswer, maxFieldBytes)
	}
	if body := r.body.Bytes(); readable(body) {
		a.Text = string(body)
	} else {
		a.Bytes = body
	}
	return a, nil
}

// readable reports whether a body is text that is not mostly escapes in JSON, nor a zero byte.
func readable(body []byte) bool {
	if !utf8.Valid(body) || bytes.IndexByte(body, 0) >= 0 {
		return false
	}
	quoted, err := json.Marshal(string(body))
	return err == nil && len(quoted) <= 2*len(body)+64
}

// maxFieldBytes bounds the fields of an answer.
const maxFieldBytes = 16 << 10

// failing tells the recorder below w, if there is one, that its handler answers an error.
func failing(w http.ResponseWriter, err error) {
	for w != nil {
		if r, ok := w.(*recorder); ok {
			r.cause = errors.Join(r.cause, err)
			return
		}
		below, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return
		}
		w = below.Unwrap()
	}
}
