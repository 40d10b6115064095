package pgserver

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
	"github.com/stretchr/testify/require"
)

// nowhere is a machine without Postgres and without a network.
func nowhere(t *testing.T) places {
	return places{
		path:        t.TempDir(),
		pgConfig:    filepath.Join(t.TempDir(), "pg_config"),
		directories: []string{filepath.Join(t.TempDir(), "*", "bin")},
		download: &download{
			version:    embeddedpostgres.V18,
			repository: "http://127.0.0.1:1",
			cache:      sharedDir(t, 0o755),
		},
	}
}

func TestStart_ListsEverythingThatWasTried(t *testing.T) {
	t.Setenv("DATABASE_URL", "")
	_, err := startAny(t.Context(), Options{}, nowhere(t))
	var sources *SourcesError
	require.ErrorAs(t, err, &sources)
	require.Len(t, sources.attempts, 3)
	message := err.Error()
	for _, part := range []string{
		"1. DATABASE_URL: not set", "2. server binaries on this machine: none in PATH", "3. download of Postgres 18", "127.0.0.1:1",
	} {
		require.Contains(t, message, part)
	}
	require.Equal(t, 3, strings.Count(message, "Fix: "), message)
}

func TestStart_DoesNotReplaceABrokenDatabaseURL(t *testing.T) {
	t.Setenv("DATABASE_URL", "postgres://nobody@127.0.0.1:1/nothing?sslmode=disable")
	_, err := Start(t.Context(), Options{})
	require.ErrorContains(t, err, "1. DATABASE_URL: failed to connect")
	require.NotContains(t, err.Error(), "2.")
}

func TestStart_ShowsTheServersLogWhenItDoesNotStart(t *testing.T) {
	tmp := sharedDir(t, 0o1777)
	t.Setenv("TMPDIR", tmp)
	_, err := Start(t.Context(), Options{Private: true, Settings: map[string]string{"shared_buffers": "nonsense"}, cache: sharedDir(t, 0o755)})
	require.ErrorIs(t, err, errServer)
	require.ErrorContains(t, err, `invalid value for parameter "shared_buffers": "nonsense"`)
	require.NotContains(t, err.Error(), "download")
	requireEmpty(t, tmp)
}

func TestStart_CancelledLeavesNothing(t *testing.T) {
	tmp := sharedDir(t, 0o1777)
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := Start(ctx, Options{Private: true})
		done <- err
	}()
	require.Eventually(t, func() bool {
		found, err := filepath.Glob(filepath.Join(tmp, "metered-pg-*", "data"))
		return err == nil && len(found) == 1
	}, startTimeout, 1)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	requireEmpty(t, tmp)
}

func TestStart_RefusesSettingsThatAreNone(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]string{"": "x", "a b": "x", "work_mem = 1 #": "x", "work_mem": "1\nfsync = on"} {
		_, err := Start(t.Context(), Options{Settings: map[string]string{name: value}})
		require.ErrorContains(t, err, "is no setting")
	}
}

func TestInstalled_PassesOverUnusableServers(t *testing.T) {
	t.Parallel()
	bin, as := realBinaries(t)
	root := sharedDir(t, 0o755)
	program := func(dir, name, script string) {
		require.NoError(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
		syscall.ForkLock.RLock() // a process that another test starts would have the file open, and it could not be run
		defer syscall.ForkLock.RUnlock()
		require.NoError(t, os.WriteFile(filepath.Join(root, dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	// Too old, silent, and new but broken. The last fails only when it is used.
	for dir, script := range map[string]string{
		"9.6/bin": "echo 'postgres (PostgreSQL) 9.6.24'",
		"10/bin":  "echo broken >&2; exit 1",
		"99/bin":  "echo 'postgres (PostgreSQL) 99devel'",
	} {
		program(dir, "postgres", script)
		program(dir, "initdb", "echo this one is broken; exit 1")
	}
	program("12/bin", "postgres", "echo 'postgres (PostgreSQL) 12.1'") // a client package: no initdb

	where := nowhere(t)
	where.directories = []string{filepath.Join(root, "*", "bin"), bin}
	found, passedOver := where.installed(t.Context(), as)
	require.Len(t, found, 2)
	require.Equal(t, installation{filepath.Join(root, "99/bin"), 99}, found[0], "newest first")
	require.Equal(t, bin, found[1].dir)
	require.Len(t, passedOver, 2)
	require.ErrorContains(t, passedOver[0].err, "broken")
	require.ErrorContains(t, passedOver[1].err, "version 9 is too old")

	s, err := startAny(t.Context(), Options{Private: true}, where)
	require.NoError(t, err)
	stopAtEnd(t, s)
	require.Equal(t, "1", query(t, s, "select 1"))

	where.directories = where.directories[:1]
	_, err = startAny(t.Context(), Options{Private: true}, where)
	require.ErrorContains(t, err, "this one is broken")
	require.ErrorContains(t, err, "download of Postgres")

	// $PATH is somebody's choice and comes before anything newer.
	where.directories, where.path = []string{filepath.Join(root, "*", "bin")}, bin
	found, _ = where.installed(t.Context(), as)
	require.Equal(t, bin, found[0].dir)
}

// The archive holds scripts that run this machine's server.
func TestStart_DownloadsOnceAsTheLastResort(t *testing.T) {
	t.Parallel()
	bin, _ := realBinaries(t)
	jar := makeJar(t, map[string]string{
		"bin/postgres": "#!/bin/sh\nexec " + bin + "/postgres \"$@\"\n",
		"bin/initdb":   "#!/bin/sh\nexec " + bin + "/initdb \"$@\"\n",
	})
	requests := 0
	repository := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		if strings.HasSuffix(r.URL.Path, ".sha256") {
			fmt.Fprintf(w, "%x", sha256.Sum256(jar))
			return
		}
		_, _ = w.Write(jar)
	}))
	defer repository.Close()
	where := nowhere(t)
	where.download.repository = repository.URL

	for range 2 {
		s, err := startAny(t.Context(), Options{Private: true, cache: where.download.cache}, where)
		require.NoError(t, err)
		require.Equal(t, "1", query(t, s, "select 1"))
		require.NoError(t, s.Stop())
	}
	require.Equal(t, 2, requests, "the archive and its checksum, once")
	entries, err := os.ReadDir(where.download.cache)
	require.NoError(t, err)
	require.Len(t, entries, 3, "the binaries, what initdb made and the lock: %v", entries)

	// A broken download is an error and leaves nothing that looks like binaries.
	jar, where.download.version = jar[:len(jar)/2], embeddedpostgres.V17
	_, err = startAny(t.Context(), Options{Private: true}, where)
	require.ErrorContains(t, err, "download of Postgres 17")
	entries, err = os.ReadDir(where.download.cache)
	require.NoError(t, err)
	require.Len(t, entries, 3, "%v", entries)
}

// realBinaries returns a directory of server binaries on this machine.
func realBinaries(t *testing.T) (string, account) {
	t.Helper()
	as, err := serverAccount()
	require.NoError(t, err)
	found, _ := usualPlaces().installed(t.Context(), as)
	if len(found) == 0 {
		t.Skip("needs server binaries on this machine")
	}
	return found[0].dir, as
}

// makeJar makes an archive like those in the repository: a zip with a tar.xz in it.
func makeJar(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var tarred bytes.Buffer
	tw := tar.NewWriter(&tarred)
	for name, content := range files {
		require.NoError(t, tw.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(content))}))
		_, err := tw.Write([]byte(content))
		require.NoError(t, err)
	}
	require.NoError(t, tw.Close())

	var jar bytes.Buffer
	zw := zip.NewWriter(&jar)
	w, err := zw.Create("postgres.txz")
	require.NoError(t, err)
	_, err = w.Write(storedXZ(tarred.Bytes()))
	require.NoError(t, err)
	require.NoError(t, zw.Close())
	return jar.Bytes()
}

// storedXZ wraps at most 64 KiB in the xz format without compressing: one block, one LZMA2 chunk, no check of the content.
func storedXZ(data []byte) []byte {
	sum := func(b []byte) []byte { return binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b)) }
	pad := func(b []byte) []byte { return append(b, make([]byte, -len(b)&3)...) }
	flags := []byte{0, 0}

	header := []byte{2, 0, 0x21, 1, 0, 0, 0, 0} // 12 bytes with its sum, one filter: LZMA2, smallest dictionary
	block := append(header, sum(header)...)
	block = append(block, 1, byte((len(data)-1)>>8), byte(len(data)-1))
	block = append(append(block, data...), 0)

	index := []byte{0, 1}
	index = binary.AppendUvarint(index, uint64(len(block)))
	index = pad(binary.AppendUvarint(index, uint64(len(data))))
	index = append(index, sum(index)...)

	size := binary.LittleEndian.AppendUint32(nil, uint32(len(index)/4-1))
	size = append(size, flags...)

	out := append([]byte("\xfd7zXZ\x00"), flags...)
	out = append(out, sum(flags)...)
	out = append(out, pad(block)...)
	out = append(out, index...)
	out = append(out, sum(size)...)
	return append(append(out, size...), "YZ"...)
}
