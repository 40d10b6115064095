package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const noRedis = notRun("redis-server is not on PATH. To have this row: apt-get install redis-server (Debian, Ubuntu), brew install redis (macOS)")

// redisServer is one of our own, reached by a socket in a directory of its own.
type redisServer struct {
	cmd    *exec.Cmd
	dir    string
	client *redis.Client
}

func startRedis(ctx context.Context) (*redisServer, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, noRedis
	}
	dir, err := os.MkdirTemp("", "metered-redis-")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "s")
	r := &redisServer{dir: dir, cmd: exec.CommandContext(ctx, program,
		"--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec",
		"--logfile", filepath.Join(dir, "log"))}
	endWithUs(r.cmd)
	if err := r.cmd.Start(); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	r.client = redis.NewClient(&redis.Options{Network: "unix", Addr: socket, PoolSize: 16})
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := r.client.Ping(ctx).Err()
		if err == nil {
			return r, nil
		}
		if time.Since(began) > 10*time.Second || ctx.Err() != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			r.stop()
			return nil, fmt.Errorf("redis-server does not answer: %w\n%s", err, log)
		}
	}
}

// stop ends the server, by force if it takes long.
func (r *redisServer) stop() {
	r.client.Close()
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(5*time.Second, func() { _ = r.cmd.Process.Kill() })
	_ = r.cmd.Wait()
	kill.Stop()
	os.RemoveAll(r.dir)
}
