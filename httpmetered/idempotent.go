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
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/tokens"
)

// Bounds of the bodies and answers that Idempotent holds in memory and stores.
const (
	defaultRequestBytes = 1 << 20
	defaultAnswerBytes  = 64 << 10
	maxAnswerBytes      = 256 << 10
)

// IdempotentConfig configures Idempotent. Only Tenant is required.
type IdempotentConfig struct {
	// Tenant names the client of a request, as Command.Tenant: the signed-in user. An error is
	// answered as by Write, and "" as 500. It must not read the body. Ids that the server makes
	// need another tenant. Required.
	Tenant func(*http.Request) (string, error)

	// Command returns the request's command: charges, a token, RecordRefusal and so on. Idempotent
	// sets its ID, Tenant and Input, and a missing Name: the request's pattern or method. An error
	// is answered as that of Tenant. Defaults to an empty command.
	Command func(r *http.Request, body []byte) (metered.Command, error)

	// Optional carries out requests without a key. Without it they are answered by 400.
	Optional bool

	// CommitBelow is the status, from 300 to 500, from which on the answer undoes the command and
	// is not recorded. Defaults to 400.
	CommitBelow int

	// RequestBytes is the largest body, which is kept in memory. A larger one is answered by 413.
	// Defaults to 1 MiB.
	RequestBytes int64

	// AnswerBytes is the largest answer, up to 256 KiB. A larger one becomes 500. Defaults to 64
	// KiB.
	AnswerBytes int

	// Reveal completes the body of a committed answer with what must not be stored, such as the
	// link with a token that the handler has minted with Tx.Secret: answers are stored in clear.
	// secret derives the same secret again, of the operation and a label (Config.SecretKey). Reveal
	// is called after the commit, and again for each replay. Its error is answered as by Write.
	// Defaults to the body as it is.
	Reveal func(r *http.Request, secret func(label string) (tokens.Secret, error), body []byte) ([]byte, error)

	// Policies are shown beside answers that were charged, and beside those of a Limit in front,
	// whose limits need other names.
	Policies *Policies

	// Documentation is the URL of your page about keys, to which 400, 409 and 422 link.
	Documentation string

	// OnError gets the errors of answers of 500 and more, but not those of the handler. Defaults
	// to slog.
	OnError func(*http.Request, error)
}

type idempotent struct {
	IdempotentConfig
	client *metered.Client
	flying sync.Map // of flight: the keys whose requests this process carries out
}

type flight struct{ tenant, key string }

// Idempotent returns a middleware that carries out a request with an Idempotency-Key once, in a
// metered command: the key is its id, method, path, query and body are its Input, and the handler's
// answer is its result, stored in clear: see IdempotentConfig.Reveal. A repetition gets that
// answer, with Idempotent-Replayed: true. Safe methods pass through.
//
// The handler writes through Tx(r), and may run several times: it must have no effect elsewhere.
// Nothing is sent before COMMIT. A refusal or failure of the command replaces its answer. A panic
// undoes the command. Answer errors of tx with Write, so that metered.Do can retry.
func Idempotent(client *metered.Client, cfg IdempotentConfig) (func(http.Handler) http.Handler, error) {
	cfg.CommitBelow = cmp.Or(cfg.CommitBelow, http.StatusBadRequest)
	cfg.RequestBytes = cmp.Or(cfg.RequestBytes, defaultRequestBytes)
	cfg.AnswerBytes = cmp.Or(cfg.AnswerBytes, defaultAnswerBytes)
	err := cmp.Or(fault.NotNil(errArgument, "client", client),
		fault.NotNil(errArgument, "IdempotentConfig.Tenant", cfg.Tenant))
	switch {
	case err != nil:
		return nil, err
	case cfg.CommitBelow < 300 || cfg.CommitBelow > 500:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.CommitBelow",
			"%d is not from 300 to 500", cfg.CommitBelow)
	case cfg.Documentation != "" && !documents(cfg.Documentation):
		return nil, fault.Invalid(errArgument, "IdempotentConfig.Documentation",
			"%q is no URL of http or https", cfg.Documentation)
	case cfg.RequestBytes < 0:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.RequestBytes", "%d is negative",
			cfg.RequestBytes)
	case cfg.AnswerBytes < 0 || cfg.AnswerBytes > maxAnswerBytes:
		return nil, fault.Invalid(errArgument, "IdempotentConfig.AnswerBytes",
			"%d is not from 0 to %d", cfg.AnswerBytes, maxAnswerBytes)
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

// Tx returns the command's transaction below Idempotent, and nil elsewhere.
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
	if err == nil && m.Reveal != nil {
		err = m.complete(r, &out.Result)
	}
	if out.Replayed {
		w.Header().Set(fieldReplayed, "true")
	}
	var own *undone
	switch {
	case err == nil:
		if m.Policies != nil && !out.Replayed {
			out.Receipt.Entries = append(out.Receipt.Entries, out.Sticky.Entries...)
			if len(out.Receipt.Entries) > 0 {
				m.Policies.Show(w.Header(), out.Receipt)
			}
		}
		out.Result.write(w, out.Replayed)
	case errors.As(err, &own) && !errors.Is(err, metered.ErrTimeout): // a deadline is one, whether the server met it first or the handler
		own.answer.write(w, false)
	default:
		m.refuse(w, r, err)
	}
}

// fieldReplayed marks an answer that was made by an earlier request.
const fieldReplayed = "Idempotent-Replayed"

// documents reports whether a URL can be the type of a problem, and stand in a Link.
func documents(page string) bool {
	u, err := url.Parse(page)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" &&
		u.String() == page && !strings.ContainsAny(page, "<> \"")
}

// words describe codes in terms of an Idempotency-Key.
var words = map[string]string{
	"operation_conflict": "the Idempotency-Key was used for another request",
	"operation_retired":  "the Idempotency-Key is too old",
	"operation_future":   "the Idempotency-Key is of the future",
	"indefinite":         "not known yet: repeat the request with the same Idempotency-Key",
}

func (m *idempotent) refuse(w http.ResponseWriter, r *http.Request, err error) {
	p := m.Policies.problem(w, err)
	p.Detail = cmp.Or(p.Detail, words[p.Code])
	if m.Documentation != "" && (words[p.Code] != "" ||
		strings.HasPrefix(p.Code, "idempotency_key_")) &&
		p.Status < http.StatusInternalServerError {
		p.Type = m.Documentation
		w.Header().Add("Link", "<"+m.Documentation+`>; rel="describedby"`)
	}
	if p.Status >= http.StatusInternalServerError {
		m.OnError(r, err)
	}
	p.Write(w)
}

var errNoTenant = errors.New("httpmetered: IdempotentConfig.Tenant returned none: all clients would have their keys in common")

func (m *idempotent) run(w http.ResponseWriter, r *http.Request,
	next http.Handler) (out metered.Outcome[answer], err error) {
	tenant, err := m.Tenant(r)
	if err == nil && tenant == "" {
		err = errNoTenant
	}
	if err != nil {
		return out, err
	}
	key, err := Key(r)
	if errors.Is(err, errKeyMissing) && m.Optional {
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
	cmd.ID, cmd.Tenant, cmd.Name = key, tenant, cmp.Or(cmd.Name, r.Pattern, methodName(r.Method))
	cmd.Input = [...]string{r.Method, r.URL.RequestURI(), hex.EncodeToString(digest[:])}
	out, err = m.do(r, cmd, body, next)
	out.Result.tenant, out.Result.id = cmd.Tenant, cmd.ID
	return out, err
}

// complete completes an answer by IdempotentConfig.Reveal.
func (m *idempotent) complete(r *http.Request, a *answer) error {
	body := a.Bytes
	if len(body) == 0 {
		body = []byte(a.Text)
	}
	revealed, err := m.Reveal(r, func(label string) (tokens.Secret, error) { return m.client.Secret(a.tenant, a.id, label) }, body)
	a.Text, a.Bytes = "", revealed
	return err
}

// methodName is a method as a command's name: clients make up methods, and an observer keeps each
// name.
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

func (m *idempotent) do(r *http.Request, cmd metered.Command, body []byte,
	next http.Handler) (metered.Outcome[answer], error) {
	this := flight{cmd.Tenant, cmd.ID}
	if _, flying := m.flying.LoadOrStore(this, true); flying { // which keeps repetitions from holding connections
		return metered.Outcome[answer]{}, errInFlight
	}
	defer m.flying.Delete(this)
	began := false
	ctx, over := finishing(r.Context())
	defer over()
	out, err := metered.Do(ctx, m.client, cmd, func(ctx context.Context, tx *metered.Tx) (answer, error) {
		began = true
		ctx, cancel := context.WithCancelCause(ctx) // the handler ends with the request
		defer cancel(nil)
		defer context.AfterFunc(r.Context(), func() {
			if errors.Is(r.Context().Err(), context.Canceled) { // ctx has the deadline, too
				cancel(context.Cause(r.Context()))
			}
		})()
		if r.Context().Err() != nil {
			return answer{}, pause.Ended(r.Context())
		}
		a, err := m.attempt(r.Clone(context.WithValue(ctx, txKey{}, tx)), body, next)
		if err == nil && r.Context().Err() != nil {
			err = pause.Ended(r.Context())
		}
		return a, err
	})
	if !began && errors.Is(err, budget.ErrBusy) && !errors.Is(err, metered.ErrSticky) {
		err = fmt.Errorf("%w: %v", errInFlight, err) // before its function a command waits only for the id
	}
	return out, err
}

// finishTimeout bounds how long a command goes on after its client has hung up.
const finishTimeout = 10 * time.Second

// finishing is ctx, of a request, for a command: it goes on for finishTimeout after the client hung
// up, so that a COMMIT which has begun, also one of sticky charges or of a refusal, is answered.
// ctx's deadline stays.
func finishing(ctx context.Context) (longer context.Context, over func()) {
	longer, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	end := func() {}
	if deadline, ok := ctx.Deadline(); ok {
		longer, end = context.WithDeadline(longer, deadline)
	}
	stop := context.AfterFunc(ctx, func() {
		if errors.Is(ctx.Err(), context.Canceled) {
			time.AfterFunc(finishTimeout, func() { cancel(context.Cause(ctx)) })
		}
	})
	return longer, func() { stop(); end(); cancel(nil) }
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
