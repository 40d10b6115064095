package pgserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The two commands of the README, on a machine that has no Postgres: the first one downloads it, and the second one finds it there.
// The programs are those that anybody runs. They look for servers where they always do, in a mount namespace in which these are hidden, and
// download from the usual address, which a proxy of the test stands for.
func TestStart_ReadmesCommandsWithoutPostgres(t *testing.T) {
	t.Parallel()
	if os.Getenv("METERED_CI") == "" && os.Getenv("METERED_LONG") == "" {
		t.Skip("runs in CI: it links two programs")
	}
	if err := exec.CommandContext(t.Context(), "unshare", "-m", "true").Run(); err != nil {
		t.Skipf("needs Linux and the right to mount: %v", err)
	}
	bin, as := realBinaries(t)
	found, _ := usualPlaces().installed(t.Context(), as)
	hidden := ""
	for _, in := range found {
		real, err := filepath.EvalSymlinks(filepath.Join(in.dir, "postgres"))
		require.NoError(t, err)
		hidden += " " + real
	}
	real, err := filepath.EvalSymlinks(filepath.Join(bin, "postgres"))
	require.NoError(t, err)

	dir := sharedDir(t, 0o755)
	project, err := filepath.Abs("../..")
	require.NoError(t, err)
	goes := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = project
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	moved := filepath.Join(dir, "elsewhere")
	goes("build", "-o", filepath.Join(dir, "quickstart"), "./examples/quickstart")
	goes("test", "-c", "-vet=off", "-o", filepath.Join(dir, "tokens.test"), "./tokens")
	require.NoError(t, os.Mkdir(moved, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "nothing"), nil, 0o644))

	proxy := newProxy(t, makeJar(t, map[string]string{
		"bin/postgres": "#!/bin/sh\nexec " + moved + "/postgres \"$@\"\n",
		"bin/initdb":   "#!/bin/sh\nexec " + moved + "/initdb \"$@\"\n",
	}))
	authority := filepath.Join(dir, "authority.pem")
	require.NoError(t, os.WriteFile(authority, proxy.pem, 0o644))
	cmd := exec.CommandContext(t.Context(), "unshare", "-m", "sh", "-e", "-c", `
mount -t tmpfs tmpfs /var/cache
mount --bind "$1" "$2"
for server in `+hidden+`; do mount --bind "$3/nothing" $server; done
"$3/quickstart" "$4/LICENSE" "$4/README.md"
"$3/tokens.test" -test.run '^TestConsume_' -test.v`, "sh", filepath.Dir(real), moved, dir, project)
	cmd.Dir = filepath.Join(project, "tokens")
	cmd.Env = append(os.Environ(), "DATABASE_URL=", "METERED_CI=", "METERED_LONG=", "HTTPS_PROXY=http://"+proxy.listener.Addr().String(), "NO_PROXY=", "SSL_CERT_FILE="+authority,
		"XDG_CACHE_HOME="+filepath.Join(dir, "cache"))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "no usable server binaries on this machine: download of Postgres")
	require.Contains(t, string(out), "stored, status: 201", "the quickstart")
	require.Contains(t, string(out), "--- PASS: TestConsume_")
	proxy.mu.Lock()
	defer proxy.mu.Unlock()
	require.Len(t, proxy.paths, 2, "the archive and its checksum, once")
	require.True(t, strings.HasSuffix(proxy.paths[0], ".jar"), "%v", proxy.paths)
}

// standIn is an HTTPS proxy that answers itself for every host: with an archive, or its checksum.
type standIn struct {
	listener net.Listener
	pem      []byte // of the authority that vouches for it
	mu       sync.Mutex
	paths    []string
}

func newProxy(t *testing.T, jar []byte) *standIn {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	authority := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	root, err := x509.CreateCertificate(rand.Reader, authority, authority, key.Public(), key)
	require.NoError(t, err)
	p := &standIn{pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root})}
	p.listener, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)

	inside := make(chan net.Conn)
	tlsConfig := &tls.Config{GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		leaf, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{hello.ServerName},
			NotBefore: authority.NotBefore, NotAfter: authority.NotAfter}, authority, key.Public(), key)
		return &tls.Certificate{Certificate: [][]byte{leaf}, PrivateKey: key}, err
	}}
	repository := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.paths = append(p.paths, r.URL.Path)
		p.mu.Unlock()
		if strings.HasSuffix(r.URL.Path, ".sha256") {
			fmt.Fprintf(w, "%x", sha256.Sum256(jar))
			return
		}
		_, _ = w.Write(jar)
	})}
	outside := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "a tunnel is wanted", http.StatusBadRequest)
			return
		}
		conn, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
			inside <- tls.Server(conn, tlsConfig)
		}
	})}
	tunnels := &channelListener{Listener: p.listener, conns: inside, closed: make(chan struct{})}
	var served sync.WaitGroup
	served.Go(func() { _ = repository.Serve(tunnels) })
	served.Go(func() { _ = outside.Serve(p.listener) })
	t.Cleanup(func() {
		_, _ = outside.Close(), repository.Close()
		served.Wait()
	})
	return p
}

// channelListener accepts the connections that somebody else has accepted.
type channelListener struct {
	net.Listener
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *channelListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conns:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *channelListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}
