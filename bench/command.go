package main

import (
	"context"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"

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

// resultOf is a command's recorded result, the id of its job in JSON.
func resultOf(job *rivertype.JobInsertResult) []byte { return strconv.AppendInt(nil, job.Job.ID, 10) }

// begin sends BEGIN and a statement with one row in one flush.
func begin(ctx context.Context, conn *pgxpool.Conn, sql string, args ...any) (pgx.Tx, error) {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{})
	batch.Queue(sql, args...)
	results := conn.SendBatch(ctx, batch)
	if err := results.Close(); err != nil {
		return nil, err
	}
	return results.Tx(), nil
}

// commandFloor makes the writes in the library's flushes: first BEGIN and the token, then the job, then charge,
// operation and COMMIT. It takes no locks beyond those of its writes.
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
		tx, err := begin(ctx, conn, floorTokenSQL, token.Digest[:])
		if err != nil {
			return err
		}
		job, err := k.queue.InsertTx(ctx, tx, work{N: 1}, nil)
		if err != nil {
			return err
		}
		id, scope := metered.NewID(), k.scope()
		batch := &pgx.Batch{}
		if locked {
			batch.Queue(lockSQL, lockKey(scope))
		}
		batch.Queue(floorChargeSQL, scope, "", id)
		batch.Queue(floorOperationSQL, "", id, fingerprint, resultOf(job), scope, job.Job.ID)
		batch.Queue("commit")
		return conn.SendBatch(ctx, batch).Close()
	}
	return contender{op: op, stock: k.stockTokens}
}

// commandMetered is the library's.
func commandMetered(k *kit) contender { return k.commandBy(k.client) }

// commandReleased is the library's with early lock release.
func commandReleased(k *kit) contender {
	return k.commandBy(k.client, func(c *metered.Command) { c.EarlyRelease = true })
}

// commandBy is a client's commands with token, charge and keyless job, after the changes.
func (k *kit) commandBy(client *metered.Client, changes ...func(*metered.Command)) contender {
	return contender{stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		cmd := metered.Command{
			ID: metered.NewID(), Name: "work",
			Token:   &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
			Charges: []budget.Charge{{Scope: k.scope(), Amount: 1, Limits: roomy}},
		}
		for _, change := range changes {
			change(&cmd)
		}
		_, err = metered.Do(ctx, client, cmd, func(ctx context.Context, tx *metered.Tx) (int64, error) {
			job, err := tx.Enqueue(ctx, work{N: 1}, nil)
			return job.JobID, err
		})
		return err
	}}
}
