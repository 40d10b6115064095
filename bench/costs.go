package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
)

// costFigures are what a command costs the rest of the database. They have no goal.
var costFigures = []figure{
	{
		name: "command_locks_held", unit: "locks",
		meaning: "entries in the lock table just before COMMIT of a command with token, job and two charges",
		measure: locksHeld,
	},
	{
		name: "command_wal_bytes", unit: "bytes",
		meaning: "WAL of a command with token, job and two charges, without the images that follow a checkpoint",
		measure: walBytes,
	},
	{
		name: "command_dead_rows", unit: "rows",
		meaning: "dead rows that a command with token, job and two charges leaves to vacuum",
		measure: deadRows,
	},
	{
		name: "command_river_notify_off_vs_on", unit: "times the rate",
		meaning: "whole commands/s over 1,000 scopes, 8 clients, with River polling only against River's NOTIFY, which it limits itself",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.compare(ctx, comparison{clients: 8, slice: b.slice(), rounds: b.rounds()}, options{}, oneOf(1000),
				entry{"off", commandPolling}, entry{"on", plainCommand})
			return out.ratio("off", "on"), err
		},
	},
	{
		name: "command_notify_none_vs_each", unit: "times the rate",
		meaning: "the same without and with a NOTIFY in each command, which takes one lock of the whole server at commit",
		measure: func(ctx context.Context, b *bench) (samples, error) {
			out, err := b.compare(ctx, comparison{clients: 8, slice: b.slice(), rounds: b.rounds()}, options{}, oneOf(1000),
				entry{"none", withStatement("select 1")}, entry{"each", withStatement("select pg_notify('bench', '')")})
			return out.ratio("none", "each"), err
		},
	},
}

// plainCommand is commandMetered without a look inside.
func plainCommand(k *kit) contender {
	c := commandMetered(k)
	c.dissect = false
	return c
}

// commandOfTwo charges two scopes.
func commandOfTwo(k *kit) contender {
	return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		return k.doWith(ctx, nil, func(c *metered.Command) {
			c.Charges = append(c.Charges, budget.Charge{Scope: other(c.Charges[0].Scope), Amount: 1, Limits: roomy})
		})
	}}
}

// other is a second scope, as long as the first.
func other(scope string) string { return "other" + scope[len("scope"):] }

func commandPolling(k *kit) contender {
	if err := k.setUp(&river.Config{PollOnly: true, Plugins: []rivertype.Plugin{jobs.Plugin()}}); err != nil {
		return contender{op: func(context.Context, int) error { return err }}
	}
	return plainCommand(k)
}

// withStatement runs a statement more in the function of each command.
func withStatement(sql string) func(*kit) contender {
	return func(k *kit) contender {
		return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
			return k.doWith(ctx, func(ctx context.Context, tx *metered.Tx) error {
				_, err := tx.Exec(ctx, sql)
				return err
			})
		}}
	}
}

const locksSQL = `
select locktype || case when locktype = 'relation' then '' else ' ' || mode end as what, count(*),
    count(*) filter (where not fastpath and locktype = 'relation')
from pg_locks where pid = pg_backend_pid() and relation is distinct from 'pg_locks'::regclass
group by 1 order by 1`

// locksHeld looks from inside a transaction that DoTx leaves open. Those on
// relations are mostly taken on a fast path that others do not meet.
func locksHeld(ctx context.Context, b *bench) (samples, error) {
	k, err := b.kit(ctx, options{}, hotScope)
	if err != nil {
		return samples{}, err
	}
	defer k.drop()
	var s samples
	var kinds []string
	for range 5 {
		if _, err := k.stockTokens(ctx, 1); err != nil {
			return s, err
		}
		total, slow := 0, 0
		kinds = nil
		err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			if err := k.doTx(ctx, tx); err != nil {
				return err
			}
			rows, err := tx.Query(ctx, locksSQL)
			if err != nil {
				return err
			}
			var what string
			var n, shared int
			_, err = pgx.ForEachRow(rows, []any{&what, &n, &shared}, func() error {
				total, slow = total+n, slow+shared
				kinds = append(kinds, fmt.Sprintf("%d %s", n, what))
				return nil
			})
			return err
		})
		if err != nil {
			return s, err
		}
		s.values = append(s.values, float64(total))
		s.note = fmt.Sprintf("%s; %d of those on relations are not on the fast path", strings.Join(kinds, ", "), slow)
	}
	return s, nil
}

// doTx runs a command with two charges in a transaction that stays open.
func (k *kit) doTx(ctx context.Context, tx pgx.Tx) error {
	token, err := k.takeToken()
	if err != nil {
		return err
	}
	_, err = metered.DoTx(ctx, k.client, tx, metered.Command{
		ID:    metered.NewID(),
		Token: &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
		Charges: []budget.Charge{
			{Scope: scopeName(1), Amount: 1, Limits: roomy}, {Scope: scopeName(2), Amount: 1, Limits: roomy},
		},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		job, err := tx.Enqueue(ctx, work{N: 1}, nil)
		return job.JobID, err
	})
	return err
}

// walBytes counts after the pages in use have had their images.
func walBytes(ctx context.Context, b *bench) (samples, error) {
	out, err := b.compare(ctx, comparison{clients: 1, count: b.pick(500, 100), rounds: b.pick(5, 2)}, options{conns: 2}, oneOf(1000),
		entry{"metered", commandOfTwo}, entry{"floor", commandFloorOfTwo})
	if err != nil {
		return samples{}, err
	}
	return samples{
		values: []float64{out.where[0].WALBytes}, where: out.where,
		note: fmt.Sprintf("the same writes unchecked: %.0f", out.where[1].WALBytes),
	}, nil
}

const (
	noVacuumSQL = `
do $$ declare t regclass; begin
    for t in select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relkind = 'r' and (n.nspname = 'metered' or c.relname like 'river%') loop
        execute format('alter table %s set (autovacuum_enabled = off)', t);
    end loop;
end $$`

	deadSQL = `
select relname, n_dead_tup::float8, n_tup_upd::float8, n_tup_hot_upd::float8
from pg_stat_user_tables where n_dead_tup > 0 order by 2 desc`
)

// deadRows reads the statistics once the sessions, which report when they end, are
// gone.
func deadRows(ctx context.Context, b *bench) (samples, error) {
	k, err := b.kit(ctx, options{setUp: []string{noVacuumSQL}}, oneOf(1000))
	if err != nil {
		return samples{}, err
	}
	defer k.drop()
	commands := b.pick(500, 100)
	if err := commandOfTwo(k).withSite(k.site).alone(ctx, commands); err != nil {
		return samples{}, err
	}
	time.Sleep(500 * time.Millisecond)
	rows, err := k.Query(ctx, deadSQL)
	if err != nil {
		return samples{}, err
	}
	var table string
	var dead, updates, hot, total float64
	var notes []string
	_, err = pgx.ForEachRow(rows, []any{&table, &dead, &updates, &hot}, func() error {
		total += dead
		notes = append(notes, fmt.Sprintf("%s %.3g (of its updates %.0f %% are HOT)", table, dead/float64(commands), 100*hot/max(updates, 1)))
		return nil
	})
	return samples{values: []float64{total / float64(commands)}, note: strings.Join(notes, ", ")}, err
}

func (c contender) withSite(s *site) contender {
	c.site = s
	return c
}
