package console

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

//go:embed page
var pageFiles embed.FS

// policy lets a page load files of this handler alone. Only console.js can run in a page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// page is the data of a template.
type page struct {
	Title, Site, Active string
	Base                string // leads from the request's path to the root of the handler
	Nav                 []struct{ Name, Path string }
	Stream              string // where what is new comes from; "" if nothing does
	Now                 time.Time
	Zone                string
	River               string
	Data                any
}

var nav = []struct{ Name, Path string }{
	{"Overview", "./"}, {"Scopes", "scopes"}, {"Holds", "holds"}, {"Leases", "leases"},
	{"Operations", "operations"},
}

// view reads the data of a page.
type view func(ctx context.Context, in *inspect.Reader, q url.Values) (page, error)

// views are the pages by their paths. A template has the name of its path, and the root's is
// overview.
func (h *Handler) views() map[string]view {
	return map[string]view{
		"": h.overview, "scopes": h.scopes, "scope": h.scope, "holds": h.holds, "hold": h.hold,
		"leases": h.leases, "operations": h.operations, "operation": h.operation, "job": h.job,
	}
}

// ServeHTTP answers GET and HEAD.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.made() {
		http.Error(w, "the Handler was not made by New", http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Security-Policy", policy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer") // addresses have names of scopes in them
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD are answered: nothing can be changed here",
			http.StatusMethodNotAllowed)
		return
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	v, known := h.pages[name]
	switch {
	case r.URL.Path == "":
		// StripPrefix left nothing: relative links would lead nowhere without the slash.
		where, _, _ := strings.Cut(r.RequestURI, "?")
		header.Set("Location", "./"+url.PathEscape(path.Base(where))+"/")
		w.WriteHeader(http.StatusPermanentRedirect)
	case known:
		h.servePage(w, r, v)
	case name == "live":
		h.serveLive(w, r)
	case name == "usage.svg":
		h.serveDrawing(w, r, h.usageSVG)
	case name == "holds.svg":
		h.serveDrawing(w, r, h.holdsSVG)
	case files[name].body != nil:
		serveFile(w, r, name)
	default:
		h.sorry(w, r, errNoPage)
	}
}

// shown is a page's template and its data.
type shown struct {
	*template.Template
	read view
}

// parse makes the templates of the pages.
func (h *Handler) parse() map[string]shown {
	pages := map[string]shown{}
	layout := template.Must(template.New("").Funcs(functions(h.cfg.Location)).ParseFS(pageFiles,
		"page/layout.html"))
	for name, v := range h.views() {
		file := "page/" + cmp.Or(name, "overview") + ".html"
		pages[name] = shown{template.Must(template.Must(layout.Clone()).ParseFS(pageFiles, file)),
			v}
	}
	h.wrong = template.Must(template.Must(layout.Clone()).ParseFS(pageFiles, "page/error.html"))
	return pages
}

// inspected calls a view in a transaction that cannot write.
func (h *Handler) inspected(ctx context.Context, q url.Values, v view) (p page, err error) {
	err = h.read(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		p, err = v(ctx, h.reader.On(tx), q)
		return err
	})
	p.Site, p.Nav, p.Zone, p.River = h.cfg.Title, nav, h.cfg.Location.String(),
		strings.TrimRight(h.cfg.RiverUI, "/")
	return p, err
}

func (h *Handler) servePage(w http.ResponseWriter, r *http.Request, s shown) {
	p, err := h.inspected(r.Context(), r.URL.Query(), s.read)
	var body bytes.Buffer
	if err == nil {
		err = s.ExecuteTemplate(&body, "layout", p)
	}
	if err != nil {
		h.sorry(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = body.WriteTo(w) // it fails if the client has gone
}

// fragments are the parts of pages that are kept live.
var fragments = map[string][]string{"": {"overview-live"}, "scope": {"scope-live", "scope-entries"},
	"hold": {"hold-live"}}

// serveLive sends the parts of a page that changed, whenever they did.
func (h *Handler) serveLive(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	name := q.Get("page")
	parts, s := fragments[name], h.pages[name]
	if parts == nil {
		h.sorry(w, r, errNoPage)
		return
	}
	if name == "scope" && q.Get("scope") == "" || name == "hold" && q.Get("id") == "" {
		h.sorry(w, r, errNoPage) // else it would fail at each reading
		return
	}
	h.stream(w, r, q.Encode(), func(ctx context.Context) (message []byte, err error) {
		defer func() {
			if p := recover(); p != nil { // of Config.Limits: no server's handler is here to catch it
				err = fmt.Errorf("panic: %v", p)
			}
			if err != nil {
				h.cfg.Logger.Warn("console: an open page could not be read", "page", name, "error",
					err)
			}
		}()
		p, err := h.inspected(ctx, q, s.read)
		var body bytes.Buffer
		for _, part := range parts {
			if err == nil {
				err = s.ExecuteTemplate(&body, part, p.Data)
			}
		}
		return event(body.Bytes()), err
	})
}

// serveDrawing sends an image. It is a document of its own, and has styles inside.
func (h *Handler) serveDrawing(w http.ResponseWriter, r *http.Request,
	draw func(context.Context, *inspect.Reader, url.Values, look) ([]byte, error)) {
	var drawing []byte
	q := r.URL.Query()
	err := h.read(r.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
		drawing, err = draw(ctx, h.reader.On(tx), q,
			look{dark: q.Get("dark") != "", narrow: q.Get("narrow") != ""})
		return err
	})
	if err != nil {
		h.sorry(w, r, err)
		return
	}
	w.Header().Set("Content-Security-Policy",
		"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	w.Header().Set("Content-Type", "image/svg+xml")
	_, _ = w.Write(drawing)
}

// files are those that pages load.
var files = map[string]file{}

type file struct {
	kind, tag string
	body      []byte
}

func init() {
	for name, kind := range map[string]string{
		"console.css": "text/css; charset=utf-8", "console.js": "text/javascript; charset=utf-8",
		"icon.svg": "image/svg+xml",
	} {
		body, _ := pageFiles.ReadFile("page/" + name) // it is there: it was embedded
		files[name] = file{kind: kind, tag: fmt.Sprintf(`"%x"`, sha256.Sum256(body)), body: body}
	}
}

// serveFile serves a file of a page. A browser keeps it, and asks each time whether it is still the
// same.
func serveFile(w http.ResponseWriter, r *http.Request, name string) {
	f := files[name]
	w.Header().Set("Content-Type", f.kind)
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("ETag", f.tag)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.body))
}

var errNoPage = errors.New("there is no such page")

// sorry explains an error to the user, and logs the details that are not for the user.
func (h *Handler) sorry(w http.ResponseWriter, r *http.Request, err error) {
	status, title, text := explained(err)
	if status >= http.StatusInternalServerError {
		h.cfg.Logger.Warn("console: not served", "path", r.URL.Path, "error", err)
		w.Header().Set("Retry-After", "5")
	}
	p := page{
		Title: title, Site: h.cfg.Title, Nav: nav, Data: text,
		Base: strings.Repeat("../", max(0, strings.Count(r.URL.Path, "/")-1)),
	}
	var body bytes.Buffer
	if err := h.wrong.ExecuteTemplate(&body, "layout", p); err != nil {
		http.Error(w, text, status)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = body.WriteTo(w)
}

// explained words an error for a viewer of the page.
func explained(err error) (status int, title, text string) {
	var argument *fault.Argument
	switch {
	case errors.Is(err, errNoPage):
		return http.StatusNotFound, "Not found", "There is no such page."
	case errors.Is(err, jobs.ErrNotParked):
		return http.StatusNotFound, "Not parked",
			"No such job waits for budget: it has started, or was dropped."
	case errors.Is(err, inspect.ErrUnknown), errors.Is(err, holds.ErrUnknown),
		errors.Is(err, holds.ErrRetired):
		return http.StatusNotFound, "Not found", "There is no such thing, or it was purged."
	case errors.As(err, &argument):
		return http.StatusBadRequest, "That cannot be asked", argument.Field + " " +
			argument.Reason + "."
	case errors.Is(err, errCrowded):
		return http.StatusServiceUnavailable, "Too many at once",
			"The page may use so many of the program’s connections, and all of them are in use."
	case errors.Is(err, fault.ErrNotGranted):
		return http.StatusInternalServerError, "Not granted",
			"The page’s role lacks the grants of metered.GrantReportingSQL."
	case errors.Is(err, fault.ErrNotMigrated):
		return http.StatusInternalServerError, "Not migrated",
			"The schema is not there, or of an older version: run metered.Migrate."
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, fault.ErrBusy),
		sqlstate.Of(err) == sqlstate.QueryCanceled,
		sqlstate.Of(err) == sqlstate.IdleInTransaction:
		return http.StatusServiceUnavailable, "Too slow", "The database did not answer in time."
	}
	return http.StatusInternalServerError, "It did not work",
		"The page could not be read. The program’s log says why."
}
