package main

import (
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// exactSleeps binds the calling goroutine to a thread of its own, for good, and takes
// the kernel's usual 50 microseconds of slack off its sleeps.
func exactSleeps() {
	runtime.LockOSThread()
	const prSetTimerSlack = 29
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetTimerSlack, 1, 0)
}

// sleep is in the kernel, since the timers of the runtime are a millisecond coarse when nothing
// else runs. It may end early.
func sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil)
}

// endWithUs has the kernel end a process that was not stopped, because this one was killed.
func endWithUs(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
