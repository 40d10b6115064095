package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/listen"
	"github.com/pgmetered/metered/jobs"
)

// Notice tells a listener of a committed command, of jobs that Client.Jobs enqueued without one, or that notices may have been missed.
type Notice struct {
	Missed    bool             `json:"missed,omitempty"` // the rest is then empty
	Namespace string           `json:"namespace,omitempty"`
	ID        string           `json:"id,omitempty"` // of the command, or "" for jobs that were enqueued in a transaction without one
	Name      string           `json:"name,omitempty"`
	Charges   []budget.Charged `json:"charges,omitempty"`
	Jobs      []jobs.Enqueued  `json:"jobs,omitempty"`
	Cut       bool             `json:"cut,omitempty"` // some did not fit: Client.Lookup has all charges
}

// Listen calls handle with each Notice of Clients with Config.NotifyJobs or NotifyChargesFrom, as holds.Book.Listen does with those of holds.
// For exactly once, enqueue a job in the command.
func (c *Client) Listen(ctx context.Context, pool *pgxpool.Pool, opts holds.ListenOptions, handle func(context.Context, Notice) error) error {
	if err := cmp.Or(c.made(), notNil("pool", pool), notNil("handle", handle)); err != nil {
		return err
	}
	if err := checkChannel("client", c.channel()); err != nil {
		return err
	}
	idle, wrong := listen.Idle(opts.Idle)
	if wrong != "" {
		return invalid("ListenOptions.Idle", "%s", wrong)
	}
	return listen.Run(ctx, listen.Channel[Notice]{
		Name: c.channel(), Config: pool.Config(), Parse: parseNotice, Missed: Notice{Missed: true},
		Idle: idle, OnError: listen.Wrapped("metered", opts.OnError),
	}, handle)
}

// channel is the channel of notices.
func (c *Client) channel() string { return listen.Commands(c.schema.String()) }

func checkChannel(field, channel string) error {
	if len(channel) > listen.MaxNameBytes {
		return invalid(field, "the channel %q is longer than the %d bytes of a name: use a shorter schema", channel, listen.MaxNameBytes)
	}
	return nil
}

func (c *Client) checkNotify() error {
	switch from := c.cfg.NotifyChargesFrom; {
	case from < 0 || from > budget.MaxAmount:
		return invalid("Config.NotifyChargesFrom", "%d is not from 0 to %d", from, int64(budget.MaxAmount))
	case from > 0:
		return checkChannel("Config.NotifyChargesFrom", c.channel())
	case c.cfg.NotifyJobs:
		return checkChannel("Config.NotifyJobs", c.channel())
	}
	return nil
}

func parseNotice(payload string) (n Notice, ok bool) {
	if json.Unmarshal([]byte(payload), &n) != nil || n.Missed || n.ID == "" && len(n.Jobs) == 0 {
		return Notice{}, false
	}
	return n, true
}

// maxPayload bounds a payload in UTF-8. Postgres takes less than 8,000 bytes in the database's encoding, in which a
// character can have half as many again (EUC_JP).
const maxPayload = 5_300

const notifySQL = `select pg_catalog.pg_notify($1, $2::text || ']}')`

// notifyJobsSQL notifies of those jobs that are there: not of jobs that a savepoint took back.
const notifyJobsSQL = `
select pg_catalog.pg_notify($1, $2::text || coalesce(pg_catalog.string_agg(j.said, ',' order by j.n), '') || ']}')
from unnest($3::bigint[], $4::text[]) with ordinality j(id, said, n)
where exists (select from %s r where r.id = j.id)
having count(*) > 0 or $5::bool`

// notifyJobs is notifyJobsSQL for River's table, as River's own statements name it.
func notifyJobs(client *river.Client[pgx.Tx]) string {
	table := pgx.Identifier{"river_job"}
	if client != nil && client.Schema() != "" {
		table = pgx.Identifier{client.Schema(), "river_job"}
	}
	return fmt.Sprintf(notifyJobsSQL, table.Sanitize())
}

// maxJobIDs is how many jobs the record of an operation names.
const maxJobIDs = 1000

// enqueued takes note of a job, for the record and the notice.
func (t *Tx) enqueued(r jobs.Result) {
	if r.Created && len(t.jobIDs) < maxJobIDs {
		t.jobIDs = append(t.jobIDs, r.JobID)
	}
	if t.client.cfg.NotifyJobs && r.Created {
		t.jobs = append(t.jobs, jobs.Enqueued{ID: r.JobID, Queue: r.Job.Queue, Kind: r.Job.Kind, Key: jobs.Key(r.Job), Tenant: jobs.Tenant(r.Job)})
	}
}

// large are the charges of the notice.
func (t *Tx) large() (large []noticed) {
	from := t.client.cfg.NotifyChargesFrom
	if from == 0 || t.charged == nil {
		return nil
	}
	for _, c := range t.charged.Charges {
		if c.Amount >= from {
			large = append(large, noticed{Scope: c.Scope, Amount: c.Amount, Note: json.RawMessage(c.Note)})
		}
	}
	return large
}

// noticed is a budget.Charged whose note is encoded already.
type noticed struct {
	Scope  string          `json:"scope"`
	Amount int64           `json:"amount"`
	Note   json.RawMessage `json:"note,omitempty"`
}

// notice is the statement that notifies of the command, or nil. It takes no lock, so it comes before those that do.
func (t *Tx) notice() *command.Statement {
	charges := t.large()
	if len(charges)+len(t.jobs) == 0 {
		return nil
	}
	// Texts cannot fail.
	head, _ := json.Marshal(Notice{Namespace: t.op.Namespace, ID: t.op.ID, Name: t.op.cmd.Name})
	room, cut := maxPayload-len(head)-len(`,"cut":true,"charges":[],"jobs":[]`), false
	fits := func(item any) (string, bool) {
		b, _ := json.Marshal(item)
		room -= len(b) + 1
		cut = cut || room < 0
		return string(b), !cut
	}
	var said, saidJobs []string
	var ids []int64
	for _, c := range charges {
		if s, ok := fits(c); ok {
			said = append(said, s)
		}
	}
	for _, j := range t.jobs {
		if s, ok := fits(j); ok {
			ids, saidJobs = append(ids, j.ID), append(saidJobs, s)
		}
	}
	text := fmt.Sprintf(`%s,"cut":%t,"charges":[%s],"jobs":[`, head[:len(head)-1], cut, strings.Join(said, ","))
	if len(ids) == 0 {
		return &command.Statement{SQL: notifySQL, Args: []any{t.client.channel(), text}}
	}
	return &command.Statement{SQL: t.client.sql.notify, Args: []any{t.client.channel(), text, ids, saidJobs, len(charges) > 0 || cut}}
}
