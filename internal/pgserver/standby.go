package pgserver

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
)

// StandbyName is the application_name under which standbys connect to their primary, for
// synchronous_standby_names.
const StandbyName = "standby"

// ErrNoBasebackup is returned by StartStandby if the server's binaries come without pg_basebackup,
// as downloaded ones do.
var ErrNoBasebackup = errors.New("no pg_basebackup beside the server's binary: install the client programs of its version")

// StartStandby returns a server that streams from primary and answers reads: a copy made by
// pg_basebackup, with the settings of the primary and, over them, those of opts. It is a standby
// until it is promoted (select pg_promote()), and may be killed, restarted and stopped like any
// other. Stop it before its primary, which waits for it otherwise.
//
// It is asynchronous at first. To have commits wait for it, set synchronous_standby_names on the
// primary once it is there (alter system, then pg_reload_conf).
//
// ctx bounds the start only. The primary must be Owned, and have Options.TCP if the standby is to.
func StartStandby(ctx context.Context, primary *Server, opts Options) (*Server, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	if !primary.owned {
		return nil, fmt.Errorf("pgserver: standby: %w", ErrNotOwned)
	}
	if opts.TCP && primary.password == "" {
		return nil, errors.New("pgserver: standby: Options.TCP needs a primary with it, whose roles and host authentication are copied")
	}
	in, err := primary.in.withBasebackup()
	if err != nil {
		return nil, fmt.Errorf("pgserver: standby: %w", err)
	}
	server, err := startCluster(ctx, opts, in, primary.as, primary)
	if err != nil {
		return nil, fmt.Errorf("pgserver: standby: %w", err)
	}
	return server, nil
}

// withBasebackup is the same installation where pg_basebackup is: not always in $PATH, where a link
// to the server may be.
func (in installation) withBasebackup() (installation, error) {
	postgres, err := filepath.EvalSymlinks(filepath.Join(in.dir, "postgres"))
	if err != nil {
		return in, err
	}
	for _, dir := range []string{in.dir, filepath.Dir(postgres)} {
		if isExecutable(filepath.Join(dir, "pg_basebackup")) {
			return installation{dir, in.major}, nil
		}
	}
	return in, ErrNoBasebackup
}

// conninfo connects a standby to s: by its socket, even if s also listens elsewhere.
func (s *Server) conninfo() (string, error) {
	config, err := pgx.ParseConfig(s.connString)
	if err != nil {
		return "", err
	}
	host := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s.dir)
	return fmt.Sprintf("host='%s' port=%d user=postgres application_name=%s", host, config.Port, StandbyName), nil
}

// standbyConf is the settings of a standby over those that came with the copy.
func (o Options) standbyConf(dir string, port int, primary string) string {
	return "synchronous_standby_names = ''\n" + // or, once promoted, it would wait for itself
		fmt.Sprintf("primary_conninfo = %s\n", quoted(primary)) + o.conf(dir, port)
}
