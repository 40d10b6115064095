package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// attempt is one source of a server that did not work.
type attempt struct {
	source string
	err    error
	fix    string // "" where the next attempt's fix covers it
}

// SourcesError says that no server could be started: everything that was tried, why it failed and
// how to fix each.
type SourcesError struct {
	attempts []attempt
}

func (e *SourcesError) Error() string {
	var b strings.Builder
	b.WriteString("pgserver: no Postgres server could be started. Tried, in this order:")
	for i, a := range e.attempts {
		fmt.Fprintf(&b, "\n  %d. %s: %s", i+1, a.source, strings.ReplaceAll(a.err.Error(), "\n", "\n     "))
		if a.fix != "" {
			fmt.Fprintf(&b, "\n     Fix: %s", a.fix)
		}
	}
	return b.String()
}

// Unwrap returns the reasons.
func (e *SourcesError) Unwrap() []error {
	errs := make([]error, len(e.attempts))
	for i, a := range e.attempts {
		errs[i] = a.err
	}
	return errs
}

// errServer marks a cluster that was made but would not serve. Its settings or the machine are at
// fault, and another source of the same program would not help.
var errServer = errors.New("the server did not start")

const (
	databaseURLFix = "set DATABASE_URL to a server that may be used for this, as a role that may create databases " +
		"(docker run --rm -e POSTGRES_PASSWORD=x -p 5432:5432 postgres:17, " +
		"then DATABASE_URL=postgres://postgres:x@localhost:5432/postgres)"
	startFix    = "see the reason above; TMPDIR may name another place for the cluster"
	downloadFix = "allow https to the Maven repository, directly or with HTTPS_PROXY"
)

// startAny tries the sources in their order.
func startAny(ctx context.Context, opts Options, where places) (*Server, error) {
	var failed SourcesError
	fail := func(a attempt) { failed.attempts = append(failed.attempts, a) }

	if url := os.Getenv("DATABASE_URL"); url != "" && !opts.Private {
		opts.logf("using the server of DATABASE_URL")
		server, err := connectTo(ctx, url)
		if err != nil {
			// Chosen by somebody: using another server instead would be a surprise.
			fail(attempt{"DATABASE_URL", err, "correct it or unset it"})
			return nil, &failed
		}
		return server, nil
	}
	reason := errors.New("not set")
	if opts.Private {
		reason = errors.New("not used, since this caller needs a server it may kill")
	}
	fail(attempt{"DATABASE_URL", reason, databaseURLFix})

	as, err := serverAccount()
	if err != nil {
		fail(attempt{"a server of our own", err, "run as another user, or add a user named nobody"})
		return nil, &failed
	}
	found, passedOver := where.installed(ctx, as)
	failed.attempts = append(failed.attempts, passedOver...)
	for _, in := range found {
		server, err := startCluster(ctx, opts, in, as, nil)
		if err == nil {
			return server, nil
		}
		fail(attempt{in.dir, err, startFix})
		if errors.Is(err, errServer) || ctx.Err() != nil {
			return nil, &failed
		}
	}

	source := fmt.Sprintf("download of Postgres %s", where.download.version)
	opts.logf("no usable server binaries on this machine: %s", source)
	dir, err := where.download.fetch(ctx, as)
	if err != nil {
		fail(attempt{source, err, downloadFix})
		return nil, &failed
	}
	major, err := majorVersion(ctx, dir, as)
	if err == nil {
		var server *Server
		if server, err = startCluster(ctx, opts, installation{dir, major}, as, nil); err == nil {
			return server, nil
		}
	}
	fail(attempt{source, err, startFix})
	return nil, &failed
}

func (o Options) logf(format string, args ...any) {
	if o.Log != nil {
		_, _ = io.WriteString(o.Log, "pgserver: "+fmt.Sprintf(format, args...)+"\n")
	}
}
