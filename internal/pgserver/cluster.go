package pgserver

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// socketPort names the socket only. Nothing listens on it without Options.TCP.
const socketPort = 5432

var settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.]*$`)

// onDisk reports whether a commit is on disk when it is acknowledged.
func (o Options) onDisk() bool { return o.Durable && o.Settings["fsync"] != "off" }

func (o Options) check() error {
	for name, value := range o.Settings {
		if !settingName.MatchString(name) || strings.ContainsAny(value, "\n\r\x00") {
			return fmt.Errorf("pgserver: %q = %q is no setting", name, value)
		}
	}
	return nil
}

// startCluster makes a cluster with the binaries and starts it: a new one, or a standby of primary.
func startCluster(ctx context.Context, opts Options, in installation, as account, primary *Server) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for try := 1; ; try++ {
		begin := time.Now()
		server, err := tryCluster(ctx, opts, in, as, primary)
		if err == nil {
			opts.logf("Postgres %d from %s in %s, as %s (%v)",
				in.major, in.dir, server.dir, as.name, time.Since(begin).Round(time.Millisecond))
			return server, nil
		}
		// Another program may have taken the port that was free a second ago.
		if !opts.TCP || try == 3 || !strings.Contains(err.Error(), "Address already in use") {
			return nil, err
		}
	}
}

func tryCluster(ctx context.Context, opts Options, in installation, as account, primary *Server) (*Server, error) {
	dir, err := newDir(as, opts.onDisk())
	if err != nil {
		return nil, err
	}
	s := &Server{owned: true, dir: dir, in: in, as: as}
	port, password, hostAuth := socketPort, "", "reject"
	s.connString = "postgres://postgres@/postgres?host=" + url.QueryEscape(dir) + "&sslmode=disable"
	if opts.TCP {
		if port, err = freePort(); err != nil {
			return nil, err
		}
		password, hostAuth = rand.Text(), "scram-sha-256"
		if primary != nil {
			password = primary.password // its roles are copied
		}
		s.password = password
		s.connString = fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/postgres?sslmode=disable", password, port)
	} else {
		s.connString += "&port=" + strconv.Itoa(port)
	}

	conf, making, command := opts.conf(dir, port), "initdb", "init "+password
	var made, prepared, from string // where what is made is kept, and what is copied
	if primary == nil {
		made = madeDir(opts.cache, in, as)
		if opts.Prepared != "" && made != "" {
			prepared = made + "-" + opts.Prepared
		}
		from = cmp.Or(isKept(prepared), isKept(made))
	}
	if from != "" {
		making, command = "cp", "unpack "+cmp.Or(password, "-")+" "+from
	}
	if primary != nil {
		conninfo, err := primary.conninfo()
		if err != nil {
			return nil, err
		}
		conf, making, command = opts.standbyConf(dir, port, conninfo), "pg_basebackup", "copy "+conninfo
	}
	var env []string
	if !opts.Durable {
		env = append(env, hugeHeap)
	}
	s.watchdog, err = startWatchdog(as, dir, in.dir, conf, hostAuth, env...)
	if err != nil {
		return nil, err
	}
	_, err = s.watchdog.do(ctx, command)
	if errors.Is(err, errFailed) {
		err = fmt.Errorf("%s in %s as %s failed:\n%s", making, dir, as.name, s.logTail())
	}
	if err == nil {
		if from == "" && password == "" {
			keepMade(made, filepath.Join(dir, "data"), conf)
		}
		err = s.launch(ctx)
	}
	if err == nil && opts.Prepare != nil && primary == nil && (prepared == "" || from != prepared) {
		err = s.prepare(ctx, opts.Prepare, prepared, conf)
	}
	if err != nil && from != "" && ctx.Err() == nil { // what was kept may be at fault
		if err := errors.Join(s.Stop(), discardMade(from)); err != nil {
			return nil, err
		}
		return tryCluster(ctx, opts, in, as, primary)
	}
	if err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// prepare calls with, and keeps the cluster that this left behind. One with a password is not kept.
func (s *Server) prepare(ctx context.Context, with func(context.Context, *Server) error, keep, conf string) error {
	if err := with(ctx, s); err != nil || keep == "" || s.password != "" {
		return err
	}
	if err := s.shutDown(ctx); err != nil {
		return err
	}
	keepMade(keep, filepath.Join(s.dir, "data"), conf)
	return errors.Join(dropPrepared(keep), s.launch(ctx))
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// conf returns the lines to append to postgresql.conf.
func (o Options) conf(dir string, port int) string {
	settings := map[string]string{
		"listen_addresses":        "",
		"port":                    strconv.Itoa(port),
		"unix_socket_directories": dir,
		"unix_socket_permissions": "0700",
		"max_connections":         "300", // parallel tests with a pool each, on machines with many cores
		"shared_buffers":          "128MB",
		"log_line_prefix":         "%m [%p] %d %a ",
		"lc_messages":             "C",
		"timezone":                "UTC",
	}
	if o.TCP {
		settings["listen_addresses"] = "127.0.0.1"
	}
	if !o.Durable {
		settings["fsync"] = "off"
		settings["synchronous_commit"] = "off"
		settings["full_page_writes"] = "off"
	}
	maps.Copy(settings, o.Settings)

	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = %s\n", name, quoted(settings[name]))
	}
	return b.String()
}

// quoted is a value as postgresql.conf has it.
func quoted(value string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(value) + "'"
}
