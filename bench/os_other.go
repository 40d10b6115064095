//go:build !linux

package main

import (
	"os/exec"
	"time"
)

func exactSleeps() {}

// sleep may be coarse here.
func sleep(d time.Duration) { time.Sleep(d) }

func endWithUs(*exec.Cmd) {}
