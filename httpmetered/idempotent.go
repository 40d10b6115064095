package httpmetered

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/fault"
)

// Bounds of what Idempotent holds in memory, and of what it stores.
const (
	DefaultRequestBytes = 1 << 20
	DefaultAnswerBytes  = 64 << 10
	MaxAnswerBytes      = 256 << 10
)

// IdempotentConfig configures Idempotent. Only Tenant is required.
type IdempotentConfig struct {
	// Tenant says whose request it is: who is signed in, Command.Namespace. One tenant's keys mean nothing to another. An
	// error is answered as Write does; a *Problem as it is. It must not read the body, nor return "" (500). Ids that the
	// server makes belong in another namespace.
	Tenant func(*http.Request) (string, error)
	// Command says what the request's command declares: charges, a token, RecordRefusal and so on. ID, Namespace and
	// Input are set for it, and Name unless it has one: the pattern of the request, or its method, "other" for one that net/http does not name. An error is answered as that of Tenant. Defaults to nothing.
	Command func(r *http.Request, body []byte) (metered.Command, error)
	// Optional lets requests without a key through, each as a command with an id of its own. Defaults to false: 400.
	Optional bool
	// CommitBelow is the status from which on the handler's answer is undone and not recorded, 300 to 500. At 500 the
	// handler's 4xx commits what it wrote, is charged, and is the recorded answer. Defaults to 400.
	CommitBelow  int
	RequestBytes int64     // how large a body may be, else 413; it is held in memory. Defaults to DefaultRequestBytes
	AnswerBytes  int       // how large an answer's body may be, up to MaxAnswerBytes, else 500. Defaults to DefaultAnswerBytes
	Policies     *Policies // are shown beside answers that were charged. Defaults to none
	// OnError is told of what is answered with 500 and more, other than by the handler. Defaults to slog.
	OnError func(*http.Request, error)
}

type idempotent struct {
	IdempotentConfig
	client *metered.Client
	flying sync.Map // of flight: the keys that are being carried out in this process
}

type flight struct{ tenant, key string }

// Idempotent returns a middleware that carries a request with an Idempotency-Key out once, after
// draft-ietf-httpapi-idempotency-key-header-07: the handler runs in a metered command, and its answer is the command's
// recorded result. A repetition gets that answer again, byte for byte, until its record is purged.
//
// The id of the command is the key, so a UUIDv7 is refused rather than carried out again after a purge. Its Input is method, path,
// query and body. Safe methods (GET, HEAD, OPTIONS, TRACE) pass through.
//
// The handler writes through Tx(r), and may run several times: it must have no effect elsewhere (metered.Func). Nothing is
// sent before COMMIT. If the command is refused or fails, that is answered instead, and nothing is recorded, but by
// Command.RecordRefusal. The handler undoes the command itself by an answer of CommitBelow and more, or a panic: its
// answer is sent then, but never recorded. It should answer errors of tx with Write, which lets metered.Do repeat those that pass.
//
// Other answers: 400 without a key or with one that is none; 422 for a key that was used for another request; 409 with
// Retry-After while another request with the key is carried out, at once in this process, and after the Client's LockTimeout
// in others; 413; and 500 for an answer that cannot be recorded (ErrAnswer).
func Idempotent(client *metered.Client, cfg IdempotentConfig) (func(http.Handler) http.Handler, error) {
	cfg.CommitBelow = cmp.Or(cfg.CommitBelow, http.StatusBadRequest)
	cfg.RequestBytes = cmp.Or(cfg.RequestBytes, DefaultRequestBytes)
	cfg.AnswerBytes = cmp.Or(cfg.AnswerBytes, DefaultAnswerBytes)
	err := cmp.Or(fault.NotNil(errArgument, "client", client), fault.NotNil(errArgument, "IdempotentConfig.Tenant", cfg.Tenant))
	switch {
	case err != nil:
		return nil, err
	case cfg.CommitBelow < 300 || cfg.CommitBelow > 500:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.CommitBelow", "%d is not from 300 to 500", cfg.CommitBelow)
	case cfg.RequestBytes < 0:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.RequestBytes", "%d is negative", cfg.RequestBytes)
	case cfg.AnswerBytes < 0 || cfg.AnswerBytes > MaxAnswerBytes:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.AnswerBytes", "%d is not from 0 to %d", cfg.AnswerBytes, MaxAnswerBytes)
	}
	if cfg.OnError == nil {
		cfg.OnError = logError
	}
	m := &idempotent{IdempotentConfig: cfg, client: client}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

func logError(r *http.Request, err error) {
	slog.ErrorContext(r.Context(), "httpmetered", "method", r.Method, "pattern", r.Pattern, "error", err)
}

type txKey struct{}

// Tx returns the transaction of the command that a handler below Idempotent runs in, and nil elsewhere.
func Tx(r *http.Request) *metered.Tx {
	tx, _ := r.Context().Value(txKey{}).(*metered.Tx)
	return tx
}

func (m *idempotent) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		next.ServeHTTP(w, r)
		return
	}
	out, err := m.run(w, r, next)
	var own *undone
	switch {
	case err == nil:
		if m.Policies != nil && !out.Replayed {
			out.Receipt.Entries = append(out.Receipt.Entries, out.Sticky.Entries...)
			m.Policies.Show(w.Header(), out.Receipt)
		}
		out.Result.write(w)
	case errors.As(err, &own):
		own.answer.write(w)
	default:
		m.refuse(w, r, err)
	}
}

// words say what a code means for an Idempotency-Key.
var words = map[string]string{
	"operation_conflict": "the Idempotency-Key was used for another request",
	"operation_retired":  "the Idempotency-Key is too old",
	"operation_future":   "the Idempotency-Key is of the future",
	"indefinite":         "not known yet: repeat the request with the same Idempotency-Key",
}

func (m *idempotent) refuse(w http.ResponseWriter, r *http.Request, err error) {
	p := m.Policies.problem(w, err)
	p.Detail = cmp.Or(p.Detail, words[p.Code])
	if p.Status >= http.StatusInternalServerError {
		m.OnError(r, err)
	}
	p.Write(w)
}

var errNoTenant = errors.New("httpmetered: IdempotentConfig.Tenant returned none: all clients would have their keys in common")

func (m *idempotent) run(w http.ResponseWriter, r *http.Request, next http.Handler) (out metered.Outcome[answer], err error) {
	tenant, err := m.Tenant(r)
	if err == nil && tenant == "" {
		err = errNoTenant
	}
	if err != nil {
		return out, err
	}
	key, err := Key(r)
	if errors.Is(err, ErrKeyMissing) && m.Optional {
		key, err = metered.NewID(), nil
	}
	if err != nil {
		return out, err
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, m.RequestBytes))
	if err != nil {
		return out, unread(err)
	}
	var cmd metered.Command
	if m.Command != nil {
		r.Body = io.NopCloser(bytes.NewReader(body))
		if cmd, err = m.Command(r, body); err != nil {
			return out, err
		}
	}
	digest := sha256.Sum256(body)
	cmd.ID, cmd.Namespace, cmd.Name = key, tenant, cmp.Or(cmd.Name, r.Pattern, methodName(r.Method))
	cmd.Input = [...]string{r.Method, r.URL.RequestURI(), hex.EncodeToString(digest[:])}
	return m.do(r, cmd, body, next)
}

// methodName is a method as a command's name: clients make up methods, and an observer keeps each name.
func methodName(method string) string {
	switch method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodConnect:
		return method
	}
	return "other"
}

// unread is the error of a body that could not be read.
func unread(err error) error {
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return err
	}
	return &Problem{Status: http.StatusBadRequest, Detail: "the body could not be read"}
}

func (m *idempotent) do(r *http.Request, cmd metered.Command, body []byte, next http.Handler) (metered.Outcome[answer], error) {
	this := flight{cmd.Namespace, cmd.ID}
	if _, flying := m.flying.LoadOrStore(this, true); flying { // which keeps repetitions from holding connections
		return metered.Outcome[answer]{}, ErrInFlight
	}
	defer m.flying.Delete(this)
	began := false
	out, err := metered.Do(r.Context(), m.client, cmd, func(ctx context.Context, tx *metered.Tx) (answer, error) {
		began = true
		return m.attempt(r.Clone(context.WithValue(ctx, txKey{}, tx)), body, next)
	})
	if !began && errors.Is(err, metered.ErrBusy) && !errors.Is(err, metered.ErrSticky) {
		err = fmt.Errorf("%w: %v", ErrInFlight, err) // what is waited for before the function is the id
	}
	return out, err
}

// attempt runs the handler.
func (m *idempotent) attempt(r *http.Request, body []byte, next http.Handler) (answer, error) {
	r.Body = io.NopCloser(bytes.NewReader(body))
	rec := &recorder{header: http.Header{}, max: m.AnswerBytes}
	next.ServeHTTP(rec, r)
	a, err := rec.answer()
	if err != nil {
		return answer{}, err
	}
	if a.Status >= m.CommitBelow {
		return answer{}, &undone{a, rec.cause}
	}
	return a, nil
}
