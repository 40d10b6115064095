package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// disk is a small file system, where the tables are. "" where the machine lets nobody mount one.
type disk string

// newDisk mounts one. The server must stop before it goes.
func newDisk(t *testing.T) disk {
	t.Helper()
	dir, err := os.MkdirTemp("", "metered-disk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512m,mode=755"); err != nil {
		t.Logf("no file system fills up: it cannot be mounted here: %v", err)
		return ""
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	return disk(dir)
}

// use makes the tables of new sessions there.
func (d disk) use(ctx context.Context, db *pgxpool.Pool, server string) error {
	if d == "" {
		return nil
	}
	owner, err := os.Stat(server)
	if err != nil {
		return err
	}
	dir := filepath.Join(string(d), "tables")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	of := owner.Sys().(*syscall.Stat_t)
	if err := os.Chown(dir, int(of.Uid), int(of.Gid)); err != nil {
		return err
	}
	if _, err := db.Exec(ctx, fmt.Sprintf("create tablespace small location '%s'", dir)); err != nil {
		return err
	}
	_, err = db.Exec(ctx, "alter database postgres set default_tablespace = small")
	db.Reset()
	return err
}

// fill takes all that is left of it, for so long: a table that grows gets an error.
func (d disk) fill(until time.Duration) error {
	if d == "" {
		return nil
	}
	name := filepath.Join(string(d), "filler")
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer os.Remove(name)
	defer f.Close()
	for size := int64(1 << 26); size >= 1<<12; {
		at, err := f.Seek(0, 2)
		if err == nil {
			err = syscall.Fallocate(int(f.Fd()), 0, at, size)
		}
		if err != nil {
			size /= 2
		}
	}
	time.Sleep(until)
	return nil
}
