package budget

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// ClockRepair says what RepairClock did.
type ClockRepair struct {
	Repaired bool          `json:"repaired"` // false if the scope was not ahead of the clock
	Seq      int64         `json:"seq"`      // the new entry's
	At       time.Time     `json:"at"`       // the new entry's
	Ahead    time.Duration `json:"-"`        // how far the last entry was ahead of the clock; in JSON "ahead_us"
}

const repairSQL = `
select coalesce(seq, 0), coalesce(at, 'epoch'), (extract(epoch from ahead) * 1000000)::bigint
from metered.repair_clock($1::text, $2::bigint, $3::int, $4::text)`

// RepairClock lets a scope go on that fails with ErrClock. Make sure first that the database's clock is right. It
// appends an entry with the clock's time, in a new epoch, and changes no entry. Earlier entries that were dated into
// the future leave a window late, never early. A second call does nothing. It needs the schema's owner or a role with
// GrantMaintenanceSQL's grants.
func (l *Ledger) RepairClock(ctx context.Context, tx pgx.Tx, scope string, note Note) (ClockRepair, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx)); err != nil {
		return ClockRepair{}, err
	}
	if err := checkScope("scope", scope); err != nil {
		return ClockRepair{}, err
	}
	if err := l.checkNote("note", note); err != nil {
		return ClockRepair{}, err
	}
	var r ClockRepair
	var aheadUS int64
	err := tx.QueryRow(ctx, l.sql.repair, scope, l.LockKey(scope), l.waitMS(), note.json()).Scan(&r.Seq, &r.At, &aheadUS)
	if err != nil {
		return ClockRepair{}, failed("repair clock", err)
	}
	r.Repaired = r.Seq > 0
	r.Ahead = time.Duration(aheadUS) * time.Microsecond
	return r, nil
}
