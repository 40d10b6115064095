// Package pgserver starts a throwaway Postgres for tests, examples and benchmarks.
//
// It uses the server of the environment variable DATABASE_URL, which it leaves as it is. Without
// one it uses server binaries on this machine, or else binaries downloaded once and cached. From
// binaries, [Start] makes a new cluster in a private directory, reached through a socket in it. A
// watchdog process owns the cluster. When this process ends in any way, the watchdog removes the
// cluster's processes and files: there is nothing to clean up after a panic or a kill.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// startTimeout bounds making a cluster and each start of it, within the caller's context. A
// download is not part of it.
const startTimeout = 90 * time.Second

// ErrNotOwned is returned by Kill, Restart and StartStandby for the server of DATABASE_URL. Set
// Options.Private where they are needed.
var ErrNotOwned = errors.New("pgserver: the server of DATABASE_URL was not started here, and is neither killed nor restarted nor copied")

// ErrStopped is returned by Kill and Restart after Stop.
var ErrStopped = errors.New("pgserver: the server is stopped")

// Options describes a server. The zero value is right for tests.
type Options struct {
	// Durable leaves the server's own defaults in place: a commit is on disk when it is
	// acknowledged. Defaults to false: fsync, synchronous_commit and full_page_writes are off, and
	// its files are in /dev/shm if that has 4 GiB to spare and TMPDIR is not set, since the cluster
	// is removed in the end anyway. With Settings of fsync = off its files are there too.
	Durable bool

	// Settings are further server parameters, by name, which override this package's. They go to
	// postgresql.conf, so that alter system still works. Ignored for DATABASE_URL.
	Settings map[string]string

	// TCP makes the server listen on a free port of 127.0.0.1 too, with a random password, and
	// ConnString name that. Defaults to false: a socket in a directory that only its user enters.
	// Ignored for DATABASE_URL.
	TCP bool

	// Private starts a server even if DATABASE_URL is set, for callers that kill it or depend on
	// Settings.
	Private bool

	// Prepare makes something in a new cluster, such as databases to copy. The cluster is kept with
	// it under the name Prepared, and the next cluster of that name is a copy, for which Prepare is
	// not called. Ignored for DATABASE_URL.
	Prepare  func(context.Context, *Server) error
	Prepared string

	// Log gets a line on each server started, with its source. Defaults to none.
	Log io.Writer

	cache string // of clusters; "" means that of the binaries
}

// Server is a running Postgres. Its methods may be called from several goroutines.
type Server struct {
	connString string
	version    int

	// The rest is set for clusters started here.
	owned    bool
	dir      string
	in       installation
	as       account
	password string // of the superuser; "" without Options.TCP
	watchdog *watchdog

	mu      sync.Mutex
	pid     int
	gone    <-chan struct{} // closed when every process of the cluster has gone and the postmaster is reaped
	stopped bool
}

// Start returns a server that is ready for connections. If there is none to be had, the error is a
// *[SourcesError].
//
// ctx bounds the start only. The server lives until Stop is called or this process ends.
func Start(ctx context.Context, opts Options) (*Server, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	return startAny(ctx, opts, usualPlaces())
}

// ConnString returns a URL of the database postgres, as a superuser, or DATABASE_URL itself.
func (s *Server) ConnString() string { return s.connString }

// Version returns the server's version in the form of its server_version_num: 150012 is 15.12.
func (s *Server) Version() int { return s.version }

// Owned reports whether the server was started here, and so can be killed.
func (s *Server) Owned() bool { return s.owned }

// Dir returns the directory that holds the cluster's socket, its log and, in data, its files. "" if
// not Owned.
func (s *Server) Dir() string { return s.dir }

// PID returns the process id of the postmaster. 0 if not Owned, or if it has ended.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running()
}

// running returns the postmaster's process id, or 0. One that crashed has been reaped, and by now
// its number may be that of a stranger. The caller holds s.mu.
func (s *Server) running() int {
	select {
	case <-s.gone:
		s.pid = 0
	default: // also if there never was one
	}
	return s.pid
}

// Stop shuts the server down without ceremony and removes all of it. It may be called again. It
// leaves a server of DATABASE_URL alone.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.owned || s.stopped {
		return nil
	}
	s.stopped, s.pid = true, 0
	if err := s.watchdog.stop(); err != nil {
		return fmt.Errorf("pgserver: stop: %w", err)
	}
	if _, err := os.Lstat(s.dir); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("pgserver: stop: %s was not removed", s.dir)
	}
	return nil
}

// Kill ends every process of the server with SIGKILL, as a crash would, and returns when they have
// gone. The data directory stays for Restart.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil || s.running() == 0 {
		return err
	}
	// Stopped first: a postmaster that runs would see its children die and start others.
	if err := syscall.Kill(s.pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("pgserver: kill: %w", err)
	}
	backends, err := children(s.pid)
	for _, pid := range backends {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended by itself
	}
	if err := errors.Join(err, syscall.Kill(s.pid, syscall.SIGKILL)); err != nil {
		return fmt.Errorf("pgserver: kill: %w", err)
	}
	select {
	case <-s.gone:
		return nil
	case <-time.After(startTimeout):
		return errors.New("pgserver: kill: some processes of the server are still there")
	}
}

// Restart starts the server again on the same data and at the same address, after a Kill or, with a
// fast shutdown first, while it runs.
func (s *Server) Restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := s.shutDown(ctx)
	if err == nil {
		err = s.launch(ctx)
	}
	if err != nil {
		return fmt.Errorf("pgserver: restart: %w", err)
	}
	return nil
}

// shutDown shuts the server down fast, if it runs. The caller holds s.mu or is alone.
func (s *Server) shutDown(ctx context.Context) error {
	if s.running() == 0 {
		return nil
	}
	_ = syscall.Kill(s.pid, syscall.SIGINT) // it may crash at this moment
	select {
	case <-s.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the shutdown: %w", ctx.Err())
	}
}

func (s *Server) usable() error {
	switch {
	case !s.owned:
		return ErrNotOwned
	case s.stopped:
		return ErrStopped
	}
	return nil
}

// launch starts the postmaster and returns when it accepts connections. The caller holds s.mu or is
// alone.
func (s *Server) launch(ctx context.Context) error {
	listen, cancel, err := lifeline(filepath.Join(s.dir, "alive"))
	if err != nil {
		return err
	}
	pid, err := s.watchdog.start(ctx)
	if err != nil {
		cancel()
		return err
	}
	ended, gone := listen(), make(chan struct{})
	s.pid, s.gone = pid, gone
	go func() {
		defer close(gone)
		<-ended
		// Reaped at once, so that the watchdog never signals a process that got the same number. It
		// fails after Stop.
		_, _ = s.watchdog.do(context.Background(), "reap")
	}()

	for {
		version, err := serverVersion(ctx, s.connString)
		if err == nil {
			if s.version == 0 { // a restart does not change it
				s.version = version
			}
			return nil
		}
		select {
		case <-gone:
			return fmt.Errorf("%w; the end of its log:\n%s", errServer, s.logTail())
		case <-ctx.Done():
			return fmt.Errorf("%w in time: %w (%w); the end of its log:\n%s", errServer, ctx.Err(), err, s.logTail())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// logTail returns the last lines of the server's log.
func (s *Server) logTail() string {
	const lines = 15
	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(log), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// connectTo returns the server of a connection string, which must answer and be new enough.
func connectTo(ctx context.Context, connString string) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	version, err := serverVersion(ctx, connString)
	if err != nil {
		return nil, err
	}
	if version/10000 < oldestMajor {
		return nil, fmt.Errorf("its version %d is too old, %d or newer is needed", version/10000, oldestMajor)
	}
	return &Server{connString: connString, version: version}, nil
}

func serverVersion(ctx context.Context, connString string) (version int, err error) {
	conn, err := pgx.Connect(ctx, connString)
	if err != nil {
		return 0, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, "select current_setting('server_version_num')::int").Scan(&version)
	return version, err
}
