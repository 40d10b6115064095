package jobs

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
)

// maxPayload bounds a payload in UTF-8, as metered's for commands does.
const maxPayload = 5_300

const notifySQL = `select pg_catalog.pg_notify($1, said) from pg_catalog.unnest($2::text[]) said`

// notify sends the jobs that were made to metered.Client.Listen, in as few payloads as they fit
// into. Postgres drops them with a rollback, also to a savepoint.
func (e *Enqueuer) notify(ctx context.Context, tx pgx.Tx, results []Result) error {
	var payloads, items []string
	room := maxPayload
	flush := func() {
		if len(items) > 0 {
			payloads, items, room = append(payloads, `{"jobs":[`+strings.Join(items, ",")+`]}`), nil, maxPayload
		}
	}
	for _, r := range results {
		if !r.Created || r.Job == nil {
			continue
		}
		job := Of(r.Job)
		job.Hold = ""
		made, err := json.Marshal(job)
		if err != nil {
			return err // never: they are texts
		}
		if len(made)+1 > room {
			flush()
		}
		items, room = append(items, string(made)), room-len(made)-1
	}
	if flush(); len(payloads) == 0 {
		return nil
	}
	_, err := tx.Exec(ctx, notifySQL, e.channel, payloads)
	return fault.Failed("jobs", "notify", err)
}
