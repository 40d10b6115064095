package pgserver

import (
	"os"
	"syscall"
)

// memoryDir returns a directory whose files are in memory, or "" if there is none with room or
// TMPDIR names another place. Tests make and drop hundreds of databases of hundreds of files. ext4
// is slow to make files where it just removed others.
func memoryDir() string {
	const dir, tmpfs, room = "/dev/shm", 0x01021994, 4 << 30
	var fs syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(dir, &fs) != nil || fs.Type != tmpfs || fs.Bavail < room/uint64(fs.Bsize) {
		return ""
	}
	return dir
}
