package pgserver

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed watchdog.sh
var watchdogScript string

// cleanupTimeout bounds how long Stop waits. The watchdog goes on by itself afterwards.
const cleanupTimeout = 60 * time.Second

// watchdog is the process that owns one cluster, a shell that runs watchdog.sh. This binary would,
// started again, first run the init functions of the program or test that it is linked into.
type watchdog struct {
	cmd *exec.Cmd
	in  io.WriteCloser // its end, wanted or not, is the order to clean up
	out *bufio.Reader

	mu sync.Mutex // one command at a time
}

func startWatchdog(as account, dir, bin, conf, hostAuth string, env ...string) (*watchdog, error) {
	cmd := exec.Command("/bin/sh", "-c", watchdogScript, "metered-pgserver", dir, bin, conf, hostAuth)
	cmd.Dir = "/" // the current directory may be a test's temporary one
	cmd.Env = append(environment(), env...)
	// A session of its own: Ctrl-C reaches the terminal's foreground group, and that is not us.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: as.credential}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the watchdog as %s: %w", as.name, err)
	}
	return &watchdog{cmd: cmd, in: in, out: bufio.NewReader(out)}, nil
}

// do sends a command and returns the rest of its answer after "ok". After an error the watchdog is
// only good for stop.
func (w *watchdog) do(ctx context.Context, command string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()

	type answer struct {
		line string
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		if _, err := io.WriteString(w.in, command+"\n"); err != nil {
			answers <- answer{err: err}
			return
		}
		line, err := w.out.ReadString('\n')
		answers <- answer{strings.TrimSpace(line), err}
	}()
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case a := <-answers:
		if a.err != nil {
			return "", fmt.Errorf("the watchdog has gone: %w", a.err)
		}
		detail, ok := strings.CutPrefix(a.line, "ok")
		if !ok {
			return "", errFailed
		}
		return strings.TrimSpace(detail), nil
	}
}

var errFailed = errors.New("failed")

func (w *watchdog) start(ctx context.Context) (pid int, err error) {
	detail, err := w.do(ctx, "start")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(detail)
}

// stop returns when the cluster and its directory are gone.
func (w *watchdog) stop() error {
	w.in.Close()
	done := make(chan error, 1)
	go func() { done <- w.cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(cleanupTimeout):
		return fmt.Errorf("cleaning up takes longer than %v (watchdog %d)", cleanupTimeout, w.cmd.Process.Pid)
	}
}

// hugeHeap makes glibc ask for huge pages where the system leaves that to programs. A backend that
// plans a few calls for the first time, which is what tests do, touches its heap for the first time
// too: it meets 850 page faults fewer of 2,200, and on a virtual machine each costs up to 17 us.
// Another C library takes no notice.
const hugeHeap = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"

// environment is the environment of the server's processes: without PG*, which would change initdb
// and clients, and with a fixed locale and time zone.
func environment() []string {
	env := []string{"LC_ALL=C", "TZ=UTC", "PATH=" + os.Getenv("PATH") + ":/usr/local/bin:/usr/bin:/bin"}
	for _, name := range []string{"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// lifeline returns a channel that is closed when every process of the cluster started next has
// gone. It must be called before the start command and its result listened to after the answer.
func lifeline(path string) (listen func() <-chan struct{}, cancel func(), err error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("opening %s: %w", path, err)
	}
	// Not waiting was for open only. Reads block in a thread of their own: kqueue does not report
	// the end of a fifo.
	if err := syscall.SetNonblock(fd, false); err != nil {
		syscall.Close(fd)
		return nil, nil, err
	}
	listen = func() <-chan struct{} {
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			defer syscall.Close(fd)
			buf := make([]byte, 64)
			for {
				n, err := syscall.Read(fd, buf)
				if errors.Is(err, syscall.EINTR) {
					continue
				}
				if n <= 0 {
					return
				}
			}
		}()
		return gone
	}
	return listen, func() { syscall.Close(fd) }, nil
}
