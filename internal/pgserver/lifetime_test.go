package pgserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func itoa(i int) string { return strconv.Itoa(i) }

// helperMode, in the environment, makes this test binary a program that starts a server and ends in some way.
const helperMode = "PGSERVER_TEST_HELPER"

func TestMain(m *testing.M) {
	if mode := os.Getenv(helperMode); mode != "" {
		helper(mode)
		return
	}
	if runtime.GOMAXPROCS(0) < 8 { // as in pgtest: these tests wait
		_ = flag.Set("test.parallel", "8")
	}
	os.Exit(m.Run())
}

// started is the helper's output.
type started struct {
	Dir                  string
	Postmaster, Watchdog int
}

func helper(mode string) {
	s, err := Start(context.Background(), Options{Private: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	_ = json.NewEncoder(os.Stdout).Encode(started{s.Dir(), s.PID(), s.watchdog.cmd.Process.Pid})
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test has looked
	switch mode {
	case "return":
	case "exit":
		os.Exit(7)
	case "panic":
		panic("on purpose")
	case "wait":
		select {}
	}
}

func TestProcessEnd_LeavesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, mode string
		end        func(pid int) error
		ignored    syscall.Signal // may be, by inheritance
	}{
		{"return", "return", nil, 0},
		{"exit", "exit", nil, 0},
		{"panic", "panic", nil, 0},
		{"SIGKILL", "wait", func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }, 0},
		{"SIGTERM", "wait", func(pid int) error { return syscall.Kill(pid, syscall.SIGTERM) }, 0},
		// The terminal sends Ctrl-C to the whole foreground group.
		{"Ctrl-C", "wait", func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) }, syscall.SIGINT},
		{"hang-up", "wait", func(pid int) error { return syscall.Kill(-pid, syscall.SIGHUP) }, syscall.SIGHUP},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.ignored != 0 && signal.Ignored(c.ignored) {
				t.Skipf("the tests were started with %v ignored, by nohup or in the background: it ends nothing", c.ignored)
			}
			base := sharedDir(t, 0o1777)
			cmd, stdin, s := startHelper(t, c.mode, base, nil)
			pids := append(processes(t, s.Postmaster), s.Watchdog)
			require.DirExists(t, s.Dir)
			require.Equal(t, base, filepath.Dir(s.Dir))
			// Out of the group: a program that survives Ctrl-C keeps its server.
			for _, pid := range []int{s.Watchdog, s.Postmaster} {
				group, err := syscall.Getpgid(pid)
				require.NoError(t, err)
				require.NotEqual(t, cmd.Process.Pid, group)
			}

			if c.end != nil {
				require.NoError(t, c.end(cmd.Process.Pid))
			}
			require.NoError(t, stdin.Close())
			_ = cmd.Wait()
			requireGone(t, s.Dir, pids)
			requireEmpty(t, base)
		})
	}
}

// Killed while the cluster is still being made: there is no moment that leaves something behind.
func TestProcessEnd_DuringStartLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, reached := range []string{"", "alive", "data/base", "data/global/pg_control", "data/postmaster.pid"} {
		t.Run("at "+reached, func(t *testing.T) {
			t.Parallel()
			base := sharedDir(t, 0o1777)
			cmd := helperCommand("wait", base)
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool {
				found, err := filepath.Glob(filepath.Join(base, "metered-pg-*", reached))
				require.NoError(t, err)
				return len(found) == 1
			}, 2*time.Minute, time.Millisecond)
			require.NoError(t, cmd.Process.Kill())
			_ = cmd.Wait()
			require.Eventually(t, func() bool {
				entries, err := os.ReadDir(base)
				require.NoError(t, err)
				return len(entries) == 0
			}, 2*time.Minute, 10*time.Millisecond)
		})
	}
}

// Also when somebody ends the watchdog itself, as a service manager does with all processes of a group.
func TestWatchdog_CleansUpOnSIGTERM(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	pids := processes(t, s.PID())
	require.NoError(t, s.watchdog.cmd.Process.Signal(syscall.SIGTERM))
	// A shell may finish its read first.
	time.AfterFunc(time.Second, func() { s.watchdog.in.Close() })
	requireGone(t, s.Dir(), pids)
	_ = s.Stop() // says that the watchdog ended badly
}

func TestStart_AsAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	// The test binary lies in a directory that only root enters.
	base, bin := sharedDir(t, 0o1777), filepath.Join(sharedDir(t, 0o755), "helper.test")
	// If this process wrote it, a child that another test forks meanwhile would have it open for writing: "text file busy".
	require.NoError(t, exec.Command("cp", thisBinary(), bin).Run())
	require.NoError(t, os.Chmod(bin, 0o755))

	const uid = 65534
	cmd, stdin, s := startHelper(t, "return", base, func(cmd *exec.Cmd) {
		cmd.Path = bin
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	})
	info, err := os.Stat(s.Dir)
	require.NoError(t, err)
	require.EqualValues(t, uid, info.Sys().(*syscall.Stat_t).Uid)
	pids := append(processes(t, s.Postmaster), s.Watchdog)
	require.NoError(t, stdin.Close())
	require.NoError(t, cmd.Wait())
	requireGone(t, s.Dir, pids)
}

func thisBinary() string {
	name, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return name
}

// helperCommand runs in a process group of its own, like a job in a terminal.
func helperCommand(mode, tmp string) *exec.Cmd {
	cmd := exec.Command(thisBinary())
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), helperMode+"="+mode, "TMPDIR="+tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

func startHelper(t *testing.T, mode, tmp string, change func(*exec.Cmd)) (*exec.Cmd, io.Closer, started) {
	t.Helper()
	cmd := helperCommand(mode, tmp)
	if change != nil {
		change(cmd)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	var s started
	if err := json.NewDecoder(stdout).Decode(&s); err != nil {
		_ = cmd.Wait()
		require.NoError(t, err, stderr.String())
	}
	return cmd, stdin, s
}

// sharedDir makes a directory with a short path that any user reaches, which t.TempDir is not. It is in memory where possible.
func sharedDir(t *testing.T, mode os.FileMode) string {
	t.Helper()
	dir, err := os.MkdirTemp(cmp.Or(memoryDir(), "/tmp"), "pgs")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	perm := mode & os.ModePerm
	if mode&0o1000 != 0 {
		perm |= os.ModeSticky
	}
	require.NoError(t, os.Chmod(dir, perm))
	return dir
}

func requireEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	require.Empty(t, strings.Join(names, " "))
}
