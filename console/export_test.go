package console

import "time"

// WaitAtMost has open pages read again after d, however long a reading takes.
func (h *Handler) WaitAtMost(d time.Duration) { h.live.longest = d }
