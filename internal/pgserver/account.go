package pgserver

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
)

// account is the user the server runs as.
type account struct {
	name       string
	credential *syscall.Credential // nil means the user we are
}

// serverAccounts are tried in this order under root, which Postgres refuses to run as.
var serverAccounts = []string{"postgres", "_postgres", "nobody", "daemon"}

func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{name: "uid " + strconv.Itoa(os.Geteuid())}, nil
	}
	for _, name := range serverAccounts {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		// Signed, since nobody is -2 on macOS.
		uid, err := strconv.ParseInt(u.Uid, 10, 64)
		if err != nil || uid == 0 {
			continue
		}
		gid, err := strconv.ParseInt(u.Gid, 10, 64)
		if err != nil {
			continue
		}
		return account{name, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return account{}, fmt.Errorf("under root the server needs another user, and none of %v exists", serverAccounts)
}

// maxDirLen leaves room for "/.s.PGSQL.5432" in a socket path, of which macOS allows 103 bytes and
// Linux 107.
const maxDirLen = 85

// newDir picks the name of a directory that the account can make and reach, short enough for a
// socket in it. The watchdog makes it, with mode 0700. It is in memory where possible, unless
// onDisk.
func newDir(as account, onDisk bool) (string, error) {
	var name [6]byte
	_, _ = rand.Read(name[:])
	bases := []string{os.TempDir(), "/tmp", "/var/tmp"}
	if memory := memoryDir(); memory != "" && !onDisk {
		bases = slices.Insert(bases, 0, memory)
	}
	for _, base := range bases {
		dir := filepath.Join(base, "metered-pg-"+hex.EncodeToString(name[:]))
		if filepath.IsAbs(dir) && len(dir) <= maxDirLen && canMakeIn(base, as) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("none of %q is a directory in which %s may make one, with a path of at most %d bytes",
		bases, as.name, maxDirLen)
}

func canMakeIn(base string, as account) bool {
	if as.credential == nil {
		info, err := os.Stat(base)
		return err == nil && info.IsDir()
	}
	const othersMayEnter, othersMayWrite = 0o001, 0o002
	info, err := os.Stat(base)
	return err == nil && info.Mode().Perm()&othersMayWrite != 0 && reachable(base, othersMayEnter)
}

// reachable reports whether dir and all its parents have the mode bits.
func reachable(dir string, bits os.FileMode) bool {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&bits != bits {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return true
		}
		dir = parent
	}
}
