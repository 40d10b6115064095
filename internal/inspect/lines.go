package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Line are the parked jobs that wait for units of one scope.
type Line struct {
	Scope    string    `json:"scope"`
	Waiting  int64     `json:"waiting"`            // jobs
	Due      bool      `json:"due"`                // a releaser is to look at it now
	LookedAt time.Time `json:"looked_at,omitzero"` // when it is looked at, zero: as soon as units are freed
	Trouble  string    `json:"trouble,omitempty"`  // why the last look failed
}

const linesSQL = `
select l.scope, l.waiting, l.wake_at <= metered.clock(), case when l.wake_at > '-infinity' and l.wake_at < 'infinity' then l.wake_at end, coalesce(l.trouble, '')
from (select * from metered.parked_scopes limit $2) l
order by l.waiting desc, l.scope limit $1`

// Lines returns the longest lines of parked jobs, of MaxLooked.
func (r *Reader) Lines(ctx context.Context, limit int) ([]Line, error) {
	limit, err := pageSize(limit)
	if err != nil {
		return nil, err
	}
	lines, err := collect(ctx, r, linesSQL, func(row pgx.CollectableRow) (l Line, err error) {
		var at *time.Time
		if err = row.Scan(&l.Scope, &l.Waiting, &l.Due, &at, &l.Trouble); err == nil && at != nil {
			l.LookedAt = at.UTC()
		}
		return l, err
	}, limit, MaxLooked)
	return lines, failed("lines", err)
}
