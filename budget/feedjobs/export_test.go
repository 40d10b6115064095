package feedjobs

import (
	"time"

	"github.com/riverqueue/river"
)

// WithTurn has a worker's jobs follow the feed for that long.
func WithTurn(w river.Worker[Args], turn time.Duration) river.Worker[Args] {
	w.(*worker).turn = turn
	return w
}
