//go:build unix && !linux

package pgserver

import (
	"bufio"
	"bytes"
	"fmt"
	"os/exec"
)

// children returns the processes whose parent is pid.
func children(pid int) ([]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=", "-o", "ppid=").Output()
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	var found []int
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		var child, parent int
		if _, err := fmt.Sscan(lines.Text(), &child, &parent); err == nil && parent == pid {
			found = append(found, child)
		}
	}
	return found, lines.Err()
}
