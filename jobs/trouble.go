package jobs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// A batch of jobs is released or dropped as a whole. If it fails, it is done again with a savepoint
// for each job. The jobs at fault are put in trouble, and the others go on.

const (
	// oneSQL inserts one job that release_jobs has released.
	oneSQL = startsSQL + `
	select 1 as nth, $2::text::jsonb as job, true as starts` + insertedSQL + `
select m.created_at, m.scheduled_at` + answeredSQL

	// takenSQL takes jobs out of their lines, and inserts none.
	takenSQL = `
select r.status, r.job, r.scope, null::timestamptz, null::timestamptz
from metered.release_jobs($1::text[], $2::text::jsonb, $3::int, $4::int, $5::interval,
	$6::metered.origin, $7::text) r`

	troubleSQL = `select metered.trouble_jobs($1::bigint[], $2::text[])`

	// Each round of a release finds the jobs at fault among those that fit.
	troubleRounds = 16
	// Characters of a reason, and of the reason why the limits of a scope are not known.
	maxReason, maxLimitsReason = 1000, 200
)

// inTrouble is the error of a parked job that could not be released or dropped.
func inTrouble(id int64, err error) error {
	return fmt.Errorf("jobs: the parked job %d is in trouble: %w", id, err)
}

// reasonOf says in words why a job is in trouble.
func reasonOf(id int64, err error) string {
	reason := err.Error()
	if pg := (*pgconn.PgError)(nil); errors.As(err, &pg) {
		reason = fmt.Sprintf("%s (SQLSTATE %s)", pg.Message, pg.Code)
		if pg.Code == sqlstate.UniqueViolation && pg.ConstraintName == "river_job_pkey" {
			reason = fmt.Sprintf("River has another job of the id %d (SQLSTATE %s)", id, pg.Code)
		}
	}
	return shortened(strings.ReplaceAll(strings.ToValidUTF8(reason, "?"), "\x00", ""), maxReason)
}

func shortened(reason string, most int) string {
	if utf8.RuneCountInString(reason) > most {
		return string([]rune(reason)[:most])
	}
	return reason
}

// ofOne reports whether err may be the fault of one job: not if the connection, the server or
// another transaction is in the way.
func ofOne(ctx context.Context, tx pgx.Tx, err error) bool {
	if err == nil || ctx.Err() != nil || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	if conn := tx.Conn(); conn == nil || conn.IsClosed() {
		return false
	}
	state := sqlstate.Of(err)
	switch {
	case state == "":
		var network *pgconn.ConnectError
		return !errors.As(err, &network)
	case state == sqlstate.LockNotAvailable:
		return false
	}
	return !slices.Contains([]string{"08", "25", "26", "40", "53", "57", "58", "XX"}, state[:2])
}

// within runs fn between a savepoint and its release, or its end.
func within(ctx context.Context, tx pgx.Tx, fn func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, tx, fn)
}

// troubled puts jobs in trouble.
func (e *Enqueuer) troubled(ctx context.Context, tx pgx.Tx, failed map[int64]error) error {
	ids := slices.Sorted(maps.Keys(failed)) // each locks its rows
	reasons := make([]string, len(ids))
	for i, id := range ids {
		reasons[i] = reasonOf(id, failed[id])
	}
	_, err := tx.Exec(ctx, e.gate.troubleSQL, ids, reasons)
	return fault.Failed("jobs", "put in trouble", err)
}

// errTakenBack ends a savepoint whose work is not wanted.
var errTakenBack = errors.New("taken back")

// releaseEach is releaseIn after it failed. Each round finds jobs at fault and takes the rest back,
// until all that fit can be released.
func (e *Enqueuer) releaseEach(ctx context.Context, tx pgx.Tx, scopes []string) (batch, error) {
	var troubles []error
	for range troubleRounds {
		var b batch
		failed := map[int64]error{}
		err := within(ctx, tx, func(tx pgx.Tx) (err error) {
			if b, err = e.take(ctx, tx, scopes, true); err != nil {
				return err
			}
			if err := e.tryEach(ctx, tx, b.jobs, failed); err != nil {
				return err
			}
			if len(failed) > 0 {
				return errTakenBack
			}
			return e.settle(ctx, tx, &b)
		})
		switch {
		case err == nil:
			b.troubles = append(troubles, b.troubles...)
			return b, nil
		case !errors.Is(err, errTakenBack):
			return batch{}, err
		}
		if err := e.troubled(ctx, tx, failed); err != nil {
			return batch{}, err
		}
		for _, id := range slices.Sorted(maps.Keys(failed)) {
			troubles = append(troubles, inTrouble(id, failed[id]))
		}
	}
	return batch{more: true, troubles: troubles}, nil
}

// tryEach releases jobs in a savepoint each, and notes those at fault. An error that no job could
// avoid is the statement's.
func (e *Enqueuer) tryEach(ctx context.Context, tx pgx.Tx, all []*releasedJob, failed map[int64]error) error {
	var statement error
	for _, j := range all {
		err := within(ctx, tx, func(tx pgx.Tx) error { return e.releaseOne(ctx, tx, j) })
		switch {
		case err == nil:
			continue
		case !ofOne(ctx, tx, err):
			return err
		}
		failed[j.ID] = err
		if strings.HasPrefix(sqlstate.Of(err), "42") { // no privilege, or no column: or row security
			statement = err
		}
	}
	if statement != nil && len(failed) == len(all) {
		return statement
	}
	return nil
}

// releaseOne makes a job that has left its line River's.
func (e *Enqueuer) releaseOne(ctx context.Context, tx pgx.Tx, j *releasedJob) error {
	if j.failed != nil {
		return j.failed
	}
	if j.Again {
		if err := e.wake(ctx, tx, []*releasedJob{j}); err != nil || j.row != nil {
			return err
		}
		return e.gone(ctx, tx, j)
	}
	var createdAt, scheduledAt time.Time
	err := answer.QueryRow(ctx, tx, e.gate.oneSQL, e.gate.riverSchema,
		string(j.raw)).Scan(&createdAt, &scheduledAt)
	if err != nil {
		return fault.Failed("jobs", "release", err)
	}
	j.row = startedRow(j.gatedJob, createdAt, scheduledAt)
	return nil
}

// dropEach is drop after it failed. It drops jobs one by one.
func (e *Enqueuer) dropEach(ctx context.Context, pool *pgxpool.Pool) (n int, troubles []error, err error) {
	err = commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		for range dropBatch {
			dropped, id := 0, int64(0)
			err := within(ctx, tx, func(tx pgx.Tx) (err error) { dropped, err = e.dropIn(ctx, tx, 1, &id); return err })
			switch {
			case err == nil && dropped == 0:
				return nil
			case err == nil:
				n += dropped
			case id == 0 || !ofOne(ctx, tx, err):
				return err
			default:
				if err := e.troubled(ctx, tx, map[int64]error{id: err}); err != nil {
					return err
				}
				troubles = append(troubles, inTrouble(id, err))
			}
		}
		return nil
	})
	if err != nil {
		return 0, nil, err
	}
	return n, troubles, nil
}
