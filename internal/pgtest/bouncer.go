package pgtest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// BouncerVersion finds PgBouncer, or skips the test.
func BouncerVersion(t testing.TB) (path string, version [2]int) {
	t.Helper()
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer"
	}
	out, err := exec.Command(path, "--version").CombinedOutput()
	if err != nil {
		t.Skip("pgbouncer is not installed")
	}
	if _, err = fmt.Sscanf(string(out), "PgBouncer %d.%d", &version[0], &version[1]); err != nil {
		t.Fatalf("pgtest: the version of PgBouncer: %v: %s", err, out)
	}
	return path, version
}

// TracksStatements reports whether PgBouncer has max_prepared_statements.
func TracksStatements(version [2]int) bool { return version[0] > 1 || version[1] >= 21 }

// Bounce puts a PgBouncer in transaction mode before the database of a pool, and returns its port.
// A session's transactions go round three connections of the server, so that nothing that one
// leaves behind is there for the next. prepared is max_prepared_statements, 0 for off.
func Bounce(t testing.TB, pool *pgxpool.Pool, prepared int) (port uint16) {
	t.Helper()
	path, version := BouncerVersion(t)
	server := pool.Config().ConnConfig
	if server.TLSConfig != nil {
		t.Skip("the server is reached through TLS")
	}
	port, cmd, err := bounce(t, path, server, map[bool]string{true: fmt.Sprintf("max_prepared_statements = %d", prepared)}[TracksStatements(version)])
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	WaitFor(t, "PgBouncer to listen", func() bool {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return port
}

func bounce(t testing.TB, path string, server *pgx.ConnConfig, also string) (uint16, *exec.Cmd, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, nil, err
	}
	port := listener.Addr().(*net.TCPAddr).Port
	_ = listener.Close()
	dir, err := os.MkdirTemp("", "metered-bouncer-")
	if err != nil {
		return 0, nil, err
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	database := fmt.Sprintf("%s = host=%s port=%d user=%s", server.Database, server.Host, server.Port, server.User)
	if server.Password != "" {
		database += " password=" + server.Password
	}
	config := []string{
		"[databases]", database,
		"[pgbouncer]", "listen_addr = 127.0.0.1", fmt.Sprintf("listen_port = %d", port), "unix_socket_dir =", "auth_type = any",
		"pool_mode = transaction", "default_pool_size = 3", "min_pool_size = 3", "server_round_robin = 1", "max_client_conn = 200", "query_wait_timeout = 10",
		"server_login_retry = 1", also,
	}
	file := filepath.Join(dir, "pgbouncer.ini")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return 0, nil, err
	}
	defer log.Close()
	t.Cleanup(func() {
		if t.Failed() {
			said, _ := os.ReadFile(log.Name())
			t.Logf("%s", said)
		}
	})
	as, err := notRoot(server.Host)
	if err := errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(file, []byte(strings.Join(config, "\n")+"\n"), 0o644)); err != nil {
		return 0, nil, err
	}
	cmd := exec.Command(path, file)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	return uint16(port), cmd, cmd.Start()
}

// notRoot is another user, since PgBouncer refuses to run as root: the owner of the server's
// socket.
func notRoot(host string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	if dir, err := os.Stat(host); err == nil && strings.HasPrefix(host, "/") {
		owner := dir.Sys().(*syscall.Stat_t)
		return &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}, nil
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(nobody.Gid, 10, 32)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, errors.Join(err, err2)
}
