package budget

import (
	"cmp"
	"context"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

// ClockState is a scope whose last entry is, or was, ahead of the clock.
type ClockState struct {
	// Scope is the scope whose last entry is ahead.
	Scope string `json:"scope"`

	// Seq is the number of its last entry, or of the repair's once it is Repaired.
	Seq int64 `json:"seq"`

	// At is the time of that entry.
	At time.Time `json:"at"`

	// Ahead is how far At lies after the database's clock.
	Ahead time.Duration `json:"-"`

	// Repaired says that the call repaired the scope.
	Repaired bool `json:"repaired"`
}

const aheadSQL = `
select t.scope, l.seq, (extract(epoch from l.at) * 1e6)::bigint, (extract(epoch from l.at - metered.clock()) * 1e6)::bigint
from pg_catalog.unnest($1::text[]) t(scope), lateral (select e.seq, e.at from metered.ledger e where e.scope = t.scope order by e.seq desc limit 1) l
where l.at > metered.clock() + $2::interval
order by t.scope collate "C"`

// ClockAhead yields scopes whose last entry is ahead of the clock by more than tolerance, 0 for
// Config.ClockTolerance.
func (l *Ledger) ClockAhead(ctx context.Context, db Querier,
	tolerance time.Duration) iter.Seq2[ClockState, error] {
	return func(yield func(ClockState, error) bool) {
		if err := cmp.Or(l.made(), notNil("db", db)); err != nil {
			yield(ClockState{}, err)
			return
		}
		if tolerance == 0 {
			tolerance = l.tolerance
		}
		if tolerance < time.Microsecond || tolerance > maxClockTolerance {
			yield(ClockState{}, invalid("tolerance", "%v is not from 1µs to %v", tolerance, maxClockTolerance))
			return
		}
		for after, n := "", scopesPage; n == scopesPage; {
			scopes, err := l.listScopes(ctx, db, after)
			var page []ClockState
			if err == nil {
				page, err = l.aheadOf(ctx, db, scopes, tolerance)
			}
			if err != nil {
				yield(ClockState{}, err)
				return
			}
			for _, s := range page {
				if !yield(s, nil) {
					return
				}
			}
			if n = len(scopes); n > 0 {
				after = scopes[n-1]
			}
		}
	}
}

// aheadOf returns those of the scopes that are ahead.
func (l *Ledger) aheadOf(ctx context.Context, db Querier, scopes []string,
	tolerance time.Duration) ([]ClockState, error) {
	rows, err := answer.Query(ctx, db, l.sql.ahead, scopes, interval(tolerance))
	if err != nil {
		return nil, failed("scopes ahead", err)
	}
	page, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s ClockState, err error) {
		var at, ahead int64
		err = row.Scan(&s.Scope, &s.Seq, &at, &ahead)
		s.At, s.Ahead = time.UnixMicro(at), time.Duration(ahead)*time.Microsecond
		return s, err
	})
	return page, failed("scopes ahead", err)
}

const repairSQL = `
select coalesce(seq, 0), coalesce(at, 'epoch'), (extract(epoch from ahead) * 1e6)::bigint
from metered.repair_clock($1::text, $2::bigint, $3::int, $4::text)`

// RepairClock ends ErrClock for a scope, once the database's clock is right: it appends an entry in
// a new epoch. A second call does nothing. It needs metered.GrantMaintenanceSQL, and READ COMMITTED
// for a scope that many charge at once without limits.
func (l *Ledger) RepairClock(ctx context.Context, tx pgx.Tx, scope string, note Note) (ClockState, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx)); err != nil {
		return ClockState{}, err
	}
	if err := checkScope("scope", scope); err != nil {
		return ClockState{}, err
	}
	if err := l.checkNote("note", note); err != nil {
		return ClockState{}, err
	}
	r := ClockState{Scope: scope}
	var aheadUS int64
	err := answer.QueryRow(ctx, tx, l.sql.repair, scope, l.LockKey(scope), l.waitMS(),
		note.json()).Scan(&r.Seq, &r.At, &aheadUS)
	if err != nil {
		return ClockState{}, failed("repair clock", err)
	}
	r.Repaired = r.Seq > 0
	r.Ahead = time.Duration(aheadUS) * time.Microsecond
	return r, nil
}
