package main

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

type work struct {
	N int `json:"n"`
}

func (work) Kind() string { return "work" }

// The writes of a command without what the library asks first.
const (
	floorTokenSQL = `
update metered.tokens set used = used + 1, ended_at = clock_timestamp() where digest = $1 returning payload`
	floorOperationSQL = `
insert into metered.operations (namespace, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats)
values ($1, $2, $3, clock_timestamp(), clock_timestamp(), $4,
    array[$5::text], array[1], array[currval('metered.bench_seq')], array[clock_timestamp()])`
)

// fingerprint has the length of a true one.
var fingerprint = make([]byte, 33)

// claimed is the result that a command records, the id of its job in JSON.
var claimed = []byte("1234567")

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

// onConn runs f on a connection, and leaves no transaction behind when it fails.
func (k *kit) onConn(ctx context.Context, f func(*pgxpool.Conn) error) error {
	conn, err := k.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release() // which closes it, if it is in a transaction still
	return f(conn)
}

// commandFloor makes the writes in the library's flushes: BEGIN and the token; the
// job; charge, operation and COMMIT. It locks nothing but what writing locks.
func commandFloor(k *kit) contender { return k.floor(false) }

// commandLockedFloor takes the scope's lock in its last flush.
func commandLockedFloor(k *kit) contender { return k.floor(true) }

func (k *kit) floor(locked bool) contender {
	op := func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		return k.onConn(ctx, func(conn *pgxpool.Conn) error {
			tx, err := begin(ctx, conn, floorTokenSQL, token.Digest[:])
			if err != nil {
				return err
			}
			if _, err := k.queue.InsertTx(ctx, tx, work{N: 1}, nil); err != nil {
				return err
			}
			id, scope := metered.NewID(), k.scope()
			batch := &pgx.Batch{}
			if locked {
				batch.Queue(lockSQL, lockKey(scope))
			}
			batch.Queue(floorChargeSQL, scope, "", id)
			batch.Queue(floorOperationSQL, "", id, fingerprint, claimed, scope)
			batch.Queue("commit")
			return conn.SendBatch(ctx, batch).Close()
		})
	}
	return contender{op: op, stock: k.stockTokens}
}

// commandSeed is the obvious order, a statement each: BEGIN, operation, lock, sum,
// entry, token, job, COMMIT.
func commandSeed(k *kit) contender {
	op := func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			id, scope := metered.NewID(), k.scope()
			// Its record comes first, which is best for it: the scope is not locked yet.
			if _, err := tx.Exec(ctx, seedOperationSQL, "", id, fingerprint, claimed, scope); err != nil {
				return err
			}
			if err := seedCheck(ctx, tx, scope); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, floorChargeSQL, scope, "", id); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, floorTokenSQL, token.Digest[:]); err != nil {
				return err
			}
			_, err := k.queue.InsertTx(ctx, tx, work{N: 1}, nil)
			return err
		})
	}
	return contender{op: op, stock: k.stockTokens}
}

// seedOperationSQL comes before the entry, so the entry's seq is the next.
const seedOperationSQL = `
insert into metered.operations (namespace, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats)
values ($1, $2, $3, clock_timestamp(), clock_timestamp(), $4,
    array[$5::text], array[1], array[1::bigint], array[clock_timestamp()])`

// commandEarly uses the library's pieces, the charge first: BEGIN and the charge in
// one flush; token; job; operation and COMMIT in one flush.
func commandEarly(k *kit) contender {
	op := func(ctx context.Context, _ int) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		id, scope := metered.NewID(), k.scope()
		call, err := k.client.Budget.Prepare(budget.Charge{Scope: scope, Amount: 1, Limits: roomy})
		if err != nil {
			return err
		}
		return k.onConn(ctx, func(conn *pgxpool.Conn) error {
			tx, err := begin(ctx, conn, call.SQL(), call.Args()...)
			if err != nil {
				return err
			}
			if _, err := k.client.Tokens.Consume(ctx, tx, "work", "bench", token.Token.Reveal()); err != nil {
				return err
			}
			if _, err := k.queue.InsertTx(ctx, tx, work{N: 1}, nil); err != nil {
				return err
			}
			batch := &pgx.Batch{}
			batch.Queue(seedOperationSQL, "", id, fingerprint, claimed, scope)
			batch.Queue("commit")
			return conn.SendBatch(ctx, batch).Close()
		})
	}
	return contender{op: op, stock: k.stockTokens}
}

// commandMetered is the library's.
func commandMetered(k *kit) contender {
	return contender{dissect: true, stock: k.stockTokens, op: func(ctx context.Context, _ int) error {
		return k.do(ctx, func(cmd metered.Command) metered.Command { return cmd })
	}}
}

// do runs a command with token, charge and keyless job.
func (k *kit) do(ctx context.Context, change func(metered.Command) metered.Command) error {
	token, err := k.takeToken()
	if err != nil {
		return err
	}
	_, err = metered.Do(ctx, k.client, change(metered.Command{
		ID: metered.NewID(), Name: "work",
		Token:   &metered.Redeem{Purpose: "work", Subject: "bench", Presented: token.Token.Reveal()},
		Charges: []budget.Charge{{Scope: k.scope(), Amount: 1, Limits: roomy}},
	}), func(ctx context.Context, tx *metered.Tx) (int64, error) {
		job, err := tx.Enqueue(ctx, work{N: 1}, nil)
		return job.JobID, err
	})
	return err
}
