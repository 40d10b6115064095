package budget

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// RangeUsage is the use of a scope from From until before To: held units count when they are
// captured (or their minimum falls due), and events when they were recorded.
type RangeUsage struct {
	// From is when the range begins.
	From time.Time `json:"from"`

	// To is when the range ends. What happens then is not in it.
	To time.Time `json:"to"`

	// Charged are the units of charges and captures in the range.
	Charged int64 `json:"charged"`

	// Credited are the units of credits in the range. Of a wallet, lots that began in it are among
	// them, and units that ended in it are subtracted, whether that was written or not. What one
	// call wrote as a sum, after many had fallen due, counts when the last of them fell due.
	Credited int64 `json:"credited"`

	// RefundedOfCharged are the units of Charged that were refunded, whenever that was. It may
	// rise after the range.
	RefundedOfCharged int64 `json:"refunded_of_charged"`

	// RefundsMade are the units refunded in the range, of any charge.
	RefundsMade int64 `json:"refunds_made"`

	// Unsettled are the units spent in the range from open leases. They count as Charged once
	// these leases are settled.
	Unsettled int64 `json:"unsettled,omitempty"`

	// Charges is how many charges Charged and Unsettled are of, counted as in a Usage.
	Charges int64 `json:"charges"`
}

// Used is Charged less RefundedOfCharged.
func (u RangeUsage) Used() int64 { return u.Charged - u.RefundedOfCharged }

// Billed is Charged less RefundsMade, perhaps negative.
func (u RangeUsage) Billed() int64 { return u.Charged - u.RefundsMade }

const usageAtSQL = `
select seq, spent, refunded, credited, refunded_after, unsettled, charges, unsettled_charges, (extract(epoch from known_from) * 1e6)::bigint, (
    select (extract(epoch from pg_catalog.min(w.at)) * 1e6)::bigint
    from rows from (pg_catalog.unnest($2::timestamptz[]), pg_catalog.unnest($4::bigint[])) w(at, shown)
    where (extract(epoch from pg_catalog.timezone($3::text, w.at)) * 1e6)::bigint operator(pg_catalog.<>) w.shown)
from metered.usage_before($1::text, $2::timestamptz[])`

// UsageBetween returns the use of a scope from a time (zero: the beginning) until before another,
// to the microsecond. A purged range is a *PurgedError, and leaves the transaction usable. To miss
// no charge that is yet to commit, call Lock first, at READ COMMITTED.
func (l *Ledger) UsageBetween(ctx context.Context, db Querier, scope string, from,
	to time.Time) (RangeUsage, error) {
	from, to, err := l.checkRange(db, scope, from, to)
	if err != nil {
		return RangeUsage{}, err
	}
	ranges, err := l.ranges(ctx, db, scope, []time.Time{from, to}, nil)
	if err != nil {
		return RangeUsage{}, err
	}
	return ranges[0], nil
}

// Series is UsageBetween for each unit of the range, up to 2,000, in one statement. The first
// begins at from, and the last ends at to. A nil location is UTC. The units begin by the program's
// data of the time zone. Where the server, whose data limits go by, shows one of their beginnings
// at another time of day, Series fails with the code budget_time_zone. Only locations that are named as in the IANA
// database are compared.
func (l *Ledger) Series(
	ctx context.Context, db Querier, scope string, from, to time.Time, unit Unit, location *time.Location,
) ([]RangeUsage, error) {
	from, to, err := l.checkRange(db, scope, from, to)
	if err != nil {
		return nil, err
	}
	if err := unit.checkSeries(); err != nil {
		return nil, err
	}
	if location == nil {
		location = time.UTC
	}
	edges, err := unit.edges(ctx, from.In(location), to.In(location), location)
	if err != nil {
		return nil, err
	}
	return l.ranges(ctx, db, scope, edges, location)
}

// checkRange returns the range in microseconds. Times are rounded up, which leaves the same entries
// in the range.
func (l *Ledger) checkRange(db Querier, scope string, from, to time.Time) (time.Time, time.Time, error) {
	err := cmp.Or(l.made(), notNil("db", db), checkScope("scope", scope), checkTime("from", from),
		checkTime("to", to))
	from, to = upToMicro(from), upToMicro(to)
	if err == nil && !from.Before(to) {
		err = invalid("to", "is not after from")
	}
	return from, to, err
}

func upToMicro(t time.Time) time.Time { return t.Add(time.Microsecond - 1).Truncate(time.Microsecond) }

// checkTime refuses a time that Postgres does not have.
func checkTime(field string, t time.Time) error {
	if year := t.UTC().Year(); year < 1 || year > 9999 {
		return invalid(field, "the year %d is not from 1 to 9999", year)
	}
	return nil
}

// sums are the running sums of a chain before some time.
type sums struct {
	seq, spent, refunded, credited, refundedAfter, unsettled, charges, unsettledCharges int64
}

// sumsAt asks for the sums before each of up to 2,000 + 1 times, which ascend, from one snapshot.
// The server must show these times in a location, which may be nil, as the program does.
func (l *Ledger) sumsAt(ctx context.Context, db Querier, scope string, times []time.Time,
	in *time.Location) ([]sums, error) {
	var zone *string
	var shown []int64 // as microseconds of UTC
	if in != nil && strings.Contains(in.String(), "/") {
		name := in.String()
		zone = &name
		for _, t := range times {
			_, offset := t.In(in).Zone()
			shown = append(shown, t.UnixMicro()+int64(offset)*1_000_000)
		}
	}
	rows, err := answer.Query(ctx, db, l.sql.usageAt, scope, times, zone, shown)
	if err != nil {
		return nil, failed("usage by time", err)
	}
	var purged error
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (sums, error) {
		var s sums
		var seq, spent, refunded, credited, after, unsettled, charges, open, knownFrom, differs *int64
		err := row.Scan(&seq, &spent, &refunded, &credited, &after, &unsettled, &charges, &open,
			&knownFrom, &differs)
		if err != nil {
			return s, err
		}
		if differs != nil {
			return s, fmt.Errorf("%w as the program does: %s at %s", errTimeZone, *zone,
				time.UnixMicro(*differs).In(in).Format(time.RFC3339))
		}
		if knownFrom != nil {
			purged = &PurgedError{Scope: scope, KnownFrom: time.UnixMicro(*knownFrom).In(times[0].Location())}
			return s, nil
		}
		return sums{*seq, *spent, *refunded, *credited, *after, *unsettled, *charges, *open}, nil
	})
	switch {
	case zone != nil && sqlstate.Of(err) == sqlstate.InvalidParameter:
		err = fmt.Errorf("%w: %s: %w", errTimeZone, *zone, err)
	case !errors.Is(err, errTimeZone):
		err = failed("usage by time", err)
	}
	return all, cmp.Or(err, purged)
}

func (l *Ledger) ranges(ctx context.Context, db Querier, scope string, edges []time.Time,
	in *time.Location) ([]RangeUsage, error) {
	at, err := l.sumsAt(ctx, db, scope, edges, in)
	if err != nil {
		return nil, err
	}
	ranges := make([]RangeUsage, len(edges)-1)
	for i := range ranges {
		a, b := at[i], at[i+1]
		ranges[i] = RangeUsage{
			From: edges[i], To: edges[i+1],
			Charged: b.spent - a.spent, Credited: b.credited - a.credited,
			RefundedOfCharged: a.refundedAfter - b.refundedAfter, RefundsMade: b.refunded - a.refunded,
			Unsettled: a.unsettled, Charges: b.charges - a.charges + a.unsettledCharges,
		}
	}
	return ranges, nil
}

// PurgedError says that a purge cut a range.
type PurgedError struct {
	// Scope is the scope that was asked about.
	Scope string

	// KnownFrom is the time from which on the use is known.
	KnownFrom time.Time
}

func (e *PurgedError) Error() string {
	return fmt.Sprintf("%v: usage is known from %s on", errWindowPurged, e.KnownFrom.Format(time.RFC3339Nano))
}

func (e *PurgedError) Unwrap() error { return errWindowPurged }
