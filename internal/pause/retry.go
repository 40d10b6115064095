package pause

import (
	"context"
	"fmt"

	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Loop makes tries, numbered from 1, until one returns no context. It pauses before the next one,
// until the context ends at the latest. Then the error is that end, with the last try's, and pkg
// before it.
func Loop(pkg string, try func(n int) (again context.Context, err error)) error {
	for n := 1; ; n++ {
		again, err := try(n)
		if again == nil {
			return err
		}
		if ended := Before(again, n); ended != nil {
			return fmt.Errorf("%s: %w, while retrying: %w", pkg, ended, err)
		}
	}
}

// Collided is a Loop that tries again after collisions with other transactions, up to most times.
func Collided(ctx context.Context, to *observed.To, pkg string, most int, try func() error) error {
	return Loop(pkg, func(n int) (context.Context, error) {
		err := try()
		if n >= most || !sqlstate.Collided(err) {
			return nil, err
		}
		to.Retried(ctx, err)
		return ctx, err
	})
}
