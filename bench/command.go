package main

import (
	"context"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

type work struct {
	N int `json:"n"`
}

func (work) Kind() string { return "work" }

// The writes of a command without the library's checks.
const (
	floorTokenSQL = `
update metered.tokens set used = used + 1, ended_at = clock_timestamp() where digest = $1 returning payload`
	floorOperationSQL = `
insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, name, jobs, scopes, amounts, seqs, ats)
values ($1, $2, $3, clock_timestamp(), clock_timestamp(), $4, 'work', array[$6::bigint],
    array[$5::text], array[1], array[currval('metered.bench_seq')], array[clock_timestamp()])`
)

// fingerprint has the length of a true one.
var fingerprint = make([]byte, 33)

// commandFloor makes the writes in the library's flushes: first BEGIN and the token, then the job,
// then charge, operation and COMMIT. It takes no locks beyond those of its writes.
func commandFloor(k *kit) contender { return k.floor(false) }

// commandLockedFloor takes the scope's lock in its last flush.
func commandLockedFloor(k *kit) contender { return k.floor(true) }

func (k *kit) floor(locked bool) contender {
	op := func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		conn, err := k.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release() // which closes it, if it is in a transaction still
		first := &pgx.Batch{}
		first.BeginTx(pgx.TxOptions{})
		first.Queue(floorTokenSQL, token.Digest[:])
		results := conn.SendBatch(ctx, first)
		if err := results.Close(); err != nil {
			return err
		}
		job, err := k.queue.InsertTx(ctx, results.Tx(), work{N: 1}, nil)
		if err != nil {
			return err
		}
		id, scope := metered.NewID(), k.scope()
		last := &pgx.Batch{}
		if locked {
			last.Queue(lockSQL, lockKey(scope))
		}
		last.Queue(floorChargeSQL, scope, "", id)
		last.Queue(floorOperationSQL, "", id, fingerprint, strconv.AppendInt(nil, job.Job.ID, 10), scope, job.Job.ID)
		last.Queue("commit")
		return conn.SendBatch(ctx, last).Close()
	}
	return contender{op: op, stock: k.stockTokens}
}

// commandMetered is the library's.
func commandMetered(k *kit) contender { return k.commandBy(k.client, false) }

// commandReleased is the library's with early lock release.
func commandReleased(k *kit) contender { return k.commandBy(k.client, true) }

// commandBy is a client's commands with token, charge and keyless job.
func (k *kit) commandBy(client *metered.Client, earlyRelease bool) contender {
	return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		cmd := metered.Command{
			ID: metered.NewID(), Name: "work",
			Token:   &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
			Charges: units(1, k.scope), EarlyRelease: earlyRelease,
		}
		_, err = metered.Do(ctx, client, cmd, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			job, err := tx.Enqueue(ctx, work{N: 1}, nil)
			return job.JobID, err
		})
		return err
	}}
}

// A hand-written command: a key that makes it once, the counter, its row, and the answer for who
// repeats it, in as many flushes.
const (
	counterKeysSQL = `create table metered.bench_keys (id text primary key, fingerprint bytea not null, result jsonb);
create table metered.bench_written (id text primary key);`
	writtenSQL       = `insert into metered.bench_written (id) values ($1)`
	counterKeySQL    = `insert into metered.bench_keys (id, fingerprint) values ($1, $2) on conflict do nothing returning id`
	counterAnswerSQL = `update metered.bench_keys set result = $2 where id = $1`
)

func commandCounter(k *kit) contender { return k.byHand(false) }

// commandCounterWriting has a write of the caller's, too.
func commandCounterWriting(k *kit) contender { return k.byHand(true) }

func (k *kit) byHand(writing bool) contender {
	return k.does("", func(ctx context.Context) error {
		conn, err := k.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		id := metered.NewID()
		first := &pgx.Batch{}
		first.BeginTx(pgx.TxOptions{})
		first.Queue(counterKeySQL, id, fingerprint)
		if err := conn.SendBatch(ctx, first).Close(); err != nil {
			return err
		}
		last := &pgx.Batch{}
		if writing {
			last.Queue(writtenSQL, id)
		}
		last.Queue(`select metered.bench_count($1, 1, $2)`, k.scope(), roomy[0].Max)
		last.Queue(counterAnswerSQL, id, "1")
		last.Queue("commit")
		return conn.SendBatch(ctx, last).Close()
	})
}

// commandTotal is commandCharge that also adds to a total of all scopes.
func commandTotal(k *kit) contender {
	return k.does("", func(ctx context.Context) error {
		charges := append(units(1, k.scope), budget.Charge{Scope: "total", Amount: 1})
		_, err := metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: work{N: 1}, Charges: charges},
			func(context.Context, *metered.Tx) (int, error) { return 1, nil })
		return err
	})
}

// commandCharge is the library's, of one charge.
func commandCharge(k *kit) contender {
	return k.does("", func(ctx context.Context) error {
		_, err := metered.Do(ctx, k.client, metered.Command{ID: metered.NewID(), Input: work{N: 1}, Charges: units(1, k.scope)},
			func(context.Context, *metered.Tx) (int, error) { return 1, nil })
		return err
	})
}

// commandBare is the library's, without a function.
func commandBare(k *kit) contender {
	return k.does("", func(ctx context.Context) error {
		_, err := metered.Do[any](ctx, k.client, metered.Command{ID: metered.NewID(), Input: work{N: 1}, Charges: units(1, k.scope)}, nil)
		return err
	})
}

// commandDeclared is the library's, with a statement that is declared.
func commandDeclared(k *kit) contender {
	return k.does("", func(ctx context.Context) error {
		id, writes := metered.NewID(), &pgx.Batch{}
		writes.Queue(writtenSQL, id)
		_, err := metered.Do[any](ctx, k.client, metered.Command{ID: id, Input: work{N: 1}, Charges: units(1, k.scope), Statements: writes}, nil)
		return err
	})
}
