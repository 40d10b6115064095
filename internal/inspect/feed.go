package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// consumersSQL finds the first unread entry of each consumer that it looks at.
const consumersSQL = `
select x.consumer, x.consumed, x.unread, x.unread_since, x.moved_at, x.whole_at,
    (extract(epoch from x.patience) * 1e6)::bigint
from (select * from metered.feed_lag f order by f.consumer limit $2) x
order by x.unread desc, x.consumer limit $1`

// Consumers returns the consumers of the feed that are furthest behind, of the first MaxPage by
// name. Ledger.FeedConsumers has all of them.
func (r *Reader) Consumers(ctx context.Context, limit int) ([]budget.FeedConsumer, error) {
	limit, err := pageSize(limit)
	if err != nil {
		return nil, err
	}
	all, err := collect(ctx, r, consumersSQL,
		func(row pgx.CollectableRow) (c budget.FeedConsumer, err error) {
			var unread, whole *time.Time
			var patience int64
			err = row.Scan(&c.Name, &c.Consumed, &c.Unread, &unread, &c.MovedAt, &whole, &patience)
			c.UnreadSince, c.MovedAt, c.NumberedTo = moment(unread), c.MovedAt.UTC(), moment(whole)
			c.Patience = time.Duration(patience) * time.Microsecond
			return c, err
		}, limit, MaxPage)
	return all, failed("consumers", err)
}
