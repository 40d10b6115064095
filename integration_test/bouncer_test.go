package integration_test

import (
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
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// bouncer is a PgBouncer in transaction mode before the database of a pool. A session's transactions go round three
// connections of the server, so that nothing that one leaves behind is there for the next.
type bouncer struct {
	port    uint16
	version [2]int
}

// bouncerVersion skips the test where there is no PgBouncer.
func bouncerVersion(t *testing.T) (path string, version [2]int) {
	t.Helper()
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer"
	}
	out, err := exec.Command(path, "--version").CombinedOutput()
	if err != nil {
		t.Skip("pgbouncer is not installed")
	}
	_, err = fmt.Sscanf(string(out), "PgBouncer %d.%d", &version[0], &version[1])
	require.NoError(t, err, "%s", out)
	return path, version
}

// tracksStatements reports whether PgBouncer has max_prepared_statements.
func tracksStatements(version [2]int) bool { return version[0] > 1 || version[1] >= 21 }

// startBouncer starts one. prepared is max_prepared_statements, 0 for off.
func startBouncer(t *testing.T, pool *pgxpool.Pool, prepared int) bouncer {
	t.Helper()
	path, version := bouncerVersion(t)
	server := pool.Config().ConnConfig
	if server.TLSConfig != nil {
		t.Skip("the server is reached through TLS")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	require.NoError(t, listener.Close())

	dir, err := os.MkdirTemp("", "metered-bouncer-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	database := fmt.Sprintf("%s = host=%s port=%d user=%s", server.Database, server.Host, server.Port, server.User)
	if server.Password != "" {
		database += " password=" + server.Password
	}
	config := []string{
		"[databases]", database,
		"[pgbouncer]", "listen_addr = 127.0.0.1", fmt.Sprintf("listen_port = %d", port), "unix_socket_dir =", "auth_type = any",
		"pool_mode = transaction", "default_pool_size = 3", "min_pool_size = 3", "server_round_robin = 1", "max_client_conn = 200", "query_wait_timeout = 10",
	}
	if tracksStatements(version) {
		config = append(config, fmt.Sprintf("max_prepared_statements = %d", prepared))
	}
	file := filepath.Join(dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(strings.Join(config, "\n")+"\n"), 0o644))
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(t, err)
	defer log.Close()
	cmd := exec.Command(path, file)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: notRoot(t, server.Host)}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(func() {
		if t.Failed() {
			said, _ := os.ReadFile(log.Name())
			t.Logf("%s", said)
		}
	})
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, 2*time.Minute, 10*time.Millisecond, "%s", log.Name())
	return bouncer{uint16(port), version}
}

// notRoot is another user, since PgBouncer refuses to run as root: the owner of the server's socket.
func notRoot(t *testing.T, host string) *syscall.Credential {
	t.Helper()
	if os.Geteuid() != 0 {
		return nil
	}
	if dir, err := os.Stat(host); err == nil && strings.HasPrefix(host, "/") {
		owner := dir.Sys().(*syscall.Stat_t)
		return &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}
	}
	nobody, err := user.Lookup("nobody")
	require.NoError(t, err)
	uid, err := strconv.ParseUint(nobody.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(nobody.Gid, 10, 32)
	require.NoError(t, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}
