package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestStart_TwiceInParallelGivesTwoServers(t *testing.T) {
	t.Parallel()
	var servers [2]*Server
	var errs [2]error
	var wg sync.WaitGroup
	for i := range servers {
		wg.Go(func() { servers[i], errs[i] = Start(t.Context(), Options{Private: true}) })
	}
	wg.Wait()
	for i, s := range servers {
		require.NoError(t, errs[i])
		stopAtEnd(t, s)
	}
	require.NotEqual(t, servers[0].Dir(), servers[1].Dir())
	run(t, servers[0], "create table only_here ()")
	require.Equal(t, "f", query(t, servers[1], "select to_regclass('only_here') is not null"))
}

func TestStart_MakesAPrivateClusterInUTF8(t *testing.T) {
	t.Parallel()
	log := &bytes.Buffer{}
	s := start(t, Options{Settings: map[string]string{"work_mem": "5MB", "search_path": `"it's", public`}, Log: log})

	require.Equal(t, "UTF8", query(t, s, "show server_encoding"))
	require.Equal(t, "C", query(t, s, "select datcollate from pg_database where datname = 'template1'"))
	require.Equal(t, "", query(t, s, "show listen_addresses"))
	require.Equal(t, "off", query(t, s, "show fsync"))
	require.Equal(t, "5MB", query(t, s, "show work_mem"))
	require.Equal(t, `"it's", public`, query(t, s, "show search_path"))
	require.Equal(t, "t", query(t, s, "select usesuper from pg_user where usename = current_user"))
	require.GreaterOrEqual(t, s.Version(), oldestMajor*10000)
	require.Equal(t, 1, strings.Count(log.String(), "\n"), log)

	info, err := os.Stat(s.Dir())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	require.NotZero(t, info.Sys().(*syscall.Stat_t).Uid, "never as root")
}

func TestStart_TCPAsksForThePassword(t *testing.T) {
	t.Parallel()
	cache := sharedDir(t, 0o755)
	for _, made := range []string{"by initdb", "without a password", "by a copy"} {
		s := start(t, Options{TCP: made != "without a password", cache: cache})
		if made == "without a password" {
			continue // it is kept
		}
		config, err := pgx.ParseConfig(s.ConnString())
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1", config.Host)
		require.Equal(t, "127.0.0.1", query(t, s, "show listen_addresses"))
		require.Equal(t, "{scram-sha-256}", query(t, s, "select array_agg(distinct auth_method) from pg_hba_file_rules where type like 'host%'"), made)

		config.Password = "wrong"
		_, err = pgx.ConnectConfig(t.Context(), config)
		require.ErrorContains(t, err, "28P01", made)
	}
}

func TestStart_DurableLeavesTheServersDefaults(t *testing.T) {
	t.Parallel()
	s := start(t, Options{Durable: true})
	for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		require.Equal(t, "on", query(t, s, "show "+name), name)
	}
}

func TestStart_HeapsAreOfHugePagesUnlessDurable(t *testing.T) {
	t.Parallel()
	const file = "/sys/kernel/mm/transparent_hugepage/enabled"
	if mode, err := os.ReadFile(file); err != nil || !bytes.Contains(mode, []byte("[madvise]")) {
		t.Skipf("needs [madvise] in %s: %s %v", file, mode, err)
	}
	var major, minor int
	libc, _ := exec.CommandContext(t.Context(), "getconf", "GNU_LIBC_VERSION").Output()
	if _, err := fmt.Sscanf(string(libc), "glibc %d.%d", &major, &minor); err != nil || major == 2 && minor < 35 {
		t.Skipf("needs glibc 2.35: %s", libc)
	}
	for _, durable := range []bool{false, true} {
		s := start(t, Options{Private: true, Durable: durable})
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", s.PID()))
		require.NoError(t, err)
		_, heap, found := strings.Cut(string(maps), "[heap]")
		require.True(t, found)
		_, flags, found := strings.Cut(heap, "VmFlags:")
		require.True(t, found)
		flags, _, _ = strings.Cut(flags, "\n")
		require.Equal(t, !durable, slices.Contains(strings.Fields(flags), "hg"), flags)
	}
}

func TestStop_LeavesNothingAndMayBeRepeated(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	pids := processes(t, s.PID())
	require.Greater(t, len(pids), 3, "the postmaster has children")
	require.NoError(t, s.Stop())
	requireGone(t, s.Dir(), pids)
	require.NoError(t, s.Stop())
	require.Zero(t, s.PID())
	require.ErrorIs(t, s.Kill(), ErrStopped)
	require.ErrorIs(t, s.Restart(t.Context()), ErrStopped)
}

func TestRestart_AfterACrashOfThePostmaster(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	require.NoError(t, syscall.Kill(s.PID(), syscall.SIGKILL))
	require.Eventually(t, func() bool { return s.PID() == 0 }, 2*time.Minute, 5*time.Millisecond)
	require.NoError(t, s.Restart(t.Context()))
	require.Equal(t, "1", query(t, s, "select 1"))
}

// A postmaster that is killed cannot free its shared memory. Linux lists the System V segment. The others go the same
// way.
func TestStop_AfterKillFreesSharedMemory(t *testing.T) {
	t.Parallel()
	const segments = "/proc/sysvipc/shm"
	if _, err := os.Stat(segments); err != nil {
		t.Skip("no list of shared memory segments on this system")
	}
	s := start(t, Options{})
	pidFile, err := os.ReadFile(filepath.Join(s.Dir(), "data", "postmaster.pid"))
	require.NoError(t, err)
	id := strings.Fields(strings.Split(string(pidFile), "\n")[6])[1]
	exists := func() bool {
		list, err := os.ReadFile(segments)
		require.NoError(t, err)
		for line := range strings.Lines(string(list)) {
			if strings.Fields(line)[1] == id {
				return true
			}
		}
		return false
	}
	require.True(t, exists())
	require.NoError(t, s.Kill())
	require.True(t, exists(), "or this test shows nothing")
	require.NoError(t, s.Stop())
	require.False(t, exists())
}

func TestStart_ServesDatabaseURLAndLeavesItAlone(t *testing.T) {
	other := start(t, Options{})
	t.Setenv("DATABASE_URL", other.ConnString())
	s, err := Start(t.Context(), Options{})
	require.NoError(t, err)
	require.False(t, s.Owned())
	require.Equal(t, other.ConnString(), s.ConnString())
	require.Equal(t, other.Version(), s.Version())
	require.Zero(t, s.PID())
	require.Empty(t, s.Dir())
	require.ErrorIs(t, s.Kill(), ErrNotOwned)
	require.ErrorIs(t, s.Restart(t.Context()), ErrNotOwned)
	require.NoError(t, s.Stop())
	require.Equal(t, "1", query(t, other, "select 1"))

	private := start(t, Options{})
	require.NotEqual(t, other.ConnString(), private.ConnString())
}

// A cluster is a copy of the first one of its binaries, without that one's settings. Where the kept one is broken another takes its place.
func TestStart_CopiesWhatInitdbMade(t *testing.T) {
	t.Parallel()
	cache := sharedDir(t, 0o755)
	identify := func(opts Options) string {
		opts.cache = cache
		s := start(t, opts)
		require.Equal(t, opts.Settings["work_mem"], strings.TrimPrefix(query(t, s, "select current_setting('work_mem')"), "4MB"))
		return query(t, s, "select system_identifier from pg_control_system()")
	}
	first := identify(Options{Settings: map[string]string{"work_mem": "5MB"}})
	require.Equal(t, first, identify(Options{}))
	require.Equal(t, first, identify(Options{TCP: true}))
	kept, err := filepath.Glob(filepath.Join(cache, "initdb-*"))
	require.NoError(t, err)
	require.Len(t, kept, 1)
	require.NoError(t, os.Truncate(filepath.Join(kept[0], "global", "pg_control"), 0))
	second := identify(Options{})
	require.NotEqual(t, first, second)
	require.Equal(t, second, identify(Options{}))
}

// A prepared cluster is a copy of the first one of its name, with what this one was given.
func TestStart_CopiesWhatWasPrepared(t *testing.T) {
	t.Parallel()
	cache := sharedDir(t, 0o755)
	calls := 0
	made := func(name string, opts Options) string {
		opts.cache, opts.Prepared = cache, name
		opts.Prepare = func(_ context.Context, s *Server) error {
			calls++
			run(t, s, "create database made_"+name)
			return nil
		}
		return query(t, start(t, opts), `select string_agg(datname, ' ') from pg_database where datname like 'made\_%'`)
	}
	require.Equal(t, "made_a", made("a", Options{Settings: map[string]string{"work_mem": "5MB"}}))
	require.Equal(t, "made_a", made("a", Options{}))
	require.Equal(t, "made_a", made("a", Options{TCP: true}))
	require.Equal(t, 1, calls)
	kept := func() []string {
		all, err := filepath.Glob(filepath.Join(cache, "initdb-*-*"))
		require.NoError(t, err)
		return all
	}
	for _, other := range []string{"v", "w", "x", "y"} {
		require.NoError(t, os.Mkdir(strings.TrimSuffix(kept()[0], "a")+other, 0o755))
	}
	require.Equal(t, "made_b", made("b", Options{TCP: true}))
	require.Equal(t, "made_b", made("b", Options{}), "one with a password was not kept")
	require.Equal(t, 3, calls)
	require.Len(t, kept(), mostPrepared)
	_, err := Start(t.Context(), Options{Private: true, cache: cache, Prepared: "f",
		Prepare: func(context.Context, *Server) error { return errors.New("not now") }})
	require.ErrorContains(t, err, "not now")
}

// Four prepared clusters are kept for one that initdb made: those that were used last.
func TestDropPrepared_DropsWhatWasNotUsedForTheLongestTime(t *testing.T) {
	t.Parallel()
	cache, now := t.TempDir(), time.Now()
	for age, name := range []string{"initdb-1", "initdb-1-a", "initdb-1-b", "initdb-1-c", "initdb-1-d", "initdb-1-e", "initdb-1-f", "initdb-2-g"} {
		require.NoError(t, os.Mkdir(filepath.Join(cache, name), 0o755))
		require.NoError(t, os.Chtimes(filepath.Join(cache, name), time.Time{}, now.Add(time.Duration(-age)*time.Hour)))
	}
	require.NotEmpty(t, isKept(filepath.Join(cache, "initdb-1-f")), "it is used")
	require.NoError(t, dropPrepared(filepath.Join(cache, "initdb-1-a")))
	left, err := filepath.Glob(filepath.Join(cache, "*"))
	require.NoError(t, err)
	for i := range left {
		left[i] = filepath.Base(left[i])
	}
	require.Equal(t, []string{"initdb-1", "initdb-1-a", "initdb-1-b", "initdb-1-c", "initdb-1-f", "initdb-2-g"}, left)
}

func start(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Private = true
	s, err := Start(t.Context(), opts)
	require.NoError(t, err)
	stopAtEnd(t, s)
	return s
}

func stopAtEnd(t *testing.T, s *Server) {
	t.Cleanup(func() {
		require.NoError(t, s.Stop())
		require.NoDirExists(t, s.Dir())
	})
}

func run(t *testing.T, s *Server, sql string) { t.Helper(); query(t, s, sql) }

// query returns the first column of the first row as text.
func query(t *testing.T, s *Server, sql string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.ConnString())
	require.NoError(t, err)
	defer conn.Close(ctx)
	results, err := conn.PgConn().Exec(ctx, sql).ReadAll()
	require.NoError(t, err)
	if len(results[0].Rows) == 0 {
		return ""
	}
	return string(results[0].Rows[0][0])
}

// processes returns the postmaster and its children.
func processes(t *testing.T, postmaster int) []int {
	t.Helper()
	pids, err := children(postmaster)
	require.NoError(t, err)
	return append(pids, postmaster)
}

func requireGone(t *testing.T, dir string, pids []int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Lstat(dir)
		return os.IsNotExist(err)
	}, 2*time.Minute, 5*time.Millisecond, "%s is still there", dir)
	for _, pid := range pids {
		require.Eventually(t, func() bool { return ended(pid) }, 2*time.Minute, 5*time.Millisecond, "process %d is still there", pid)
	}
}

// ended reports whether a process has gone or is only waited for: a container's first process may never do that.
func ended(pid int) bool {
	if syscall.Kill(pid, 0) == syscall.ESRCH {
		return true
	}
	stat, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "stat"))
	return err == nil && bytes.Contains(stat, []byte(") Z "))
}

func TestStart_KeepsFilesInMemoryUnlessDurable(t *testing.T) {
	if memoryDir() == "" {
		t.Skip("/dev/shm has no room, or TMPDIR names another place")
	}
	killed := Options{Durable: true, Settings: map[string]string{"fsync": "off"}}
	for memory, opts := range map[bool][]Options{true: {{}, killed}, false: {{Durable: true}}} {
		for _, o := range opts {
			dir, err := newDir(account{}, o.onDisk())
			require.NoError(t, err)
			require.Equal(t, memory, filepath.Dir(dir) == memoryDir())
		}
	}
	t.Setenv("TMPDIR", t.TempDir())
	require.Empty(t, memoryDir())
}
