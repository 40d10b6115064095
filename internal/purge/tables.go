package purge

// Table is a kind of old rows: how many there are, and how a batch of them is deleted.
type Table struct {
	name  string // the observer's
	count string
	purge string
	waits bool // purge takes how many milliseconds it may wait for locks
}

// The tables, apart from the ledger's entries, which budget.Ledger.Purge deletes. Each statement is
// granted by metered.GrantMaintenanceSQL, and each count needs SELECT on its table.
var (
	// Holds are holds that ended, with their history. Confirmed claims, unannounced holds, and holds
	// whose id has a later time stay. Afterwards an id with a time (UUIDv7) at or before the latest
	// deleted one is holds.ErrRetired, and any other looks new. A call waits, up to LockTimeout, for
	// other calls and for REPEATABLE READ transactions that placed an id with a time.
	Holds = &Table{name: "holds", waits: true, count: `
select count(*) from metered.holds h, (select metered.clock() - $1::interval as at) cutoff
where h.ended_at is not null and (h.claim is null or h.state <> 'c' or h.returned)
  and h.ended_at < cutoff.at and not h.pending and coalesce(h.issued_at, h.ended_at) < cutoff.at`,
		purge: `select deleted, last from metered.purge_holds($1, metered.clock() - $2::interval, $3, $4)`}

	// Leases are settled leases with their spends, and both count.
	Leases = &Table{name: "leases", count: `
select coalesce(pg_catalog.sum(1 + (select count(*) from metered.lease_spends s where s.lease = y.no)), 0)::bigint
from metered.leases y, (select metered.clock() - $1::interval as at) cutoff
where y.settled_at < cutoff.at and (y.mode <> 'g' or y.home_at is not null and y.ends_at < cutoff.at)`,
		purge: `select deleted, last from metered.purge_leases($1, metered.clock() - $2::interval, $3)`}

	// Tokens are tokens that ended, by their last use, their revocation or their expiry.
	Tokens = &Table{name: "tokens", count: `
select count(*) from metered.tokens t, (select metered.clock() - $1::interval as at) cutoff
where coalesce(t.ended_at, t.expires_at) <= cutoff.at`,
		purge: `select deleted, last from metered.purge_tokens($1, metered.clock() - $2::interval, $3)`}

	// Operations are records of commands, issued and completed so long ago. Afterwards an id with a
	// time at or before the latest deleted one is budget.ErrRetired, and one without a time looks
	// new. Calls wait for each other, up to LockTimeout.
	Operations = &Table{name: "operations", waits: true, count: `
select count(*) from metered.operations o, (select metered.clock() - $1::interval as at) cutoff
where o.at < cutoff.at and coalesce(o.issued_at, o.at) < cutoff.at`,
		purge: `select deleted, last from metered.purge_operations($1, metered.clock() - $2::interval, $3, $4)`}

	// JobKeys are keys of jobs. A deleted key looks new.
	JobKeys = &Table{name: "job_keys", count: `
select count(*) from metered.job_keys k, (select metered.clock() - $1::interval as at) cutoff
where k.created_at < cutoff.at`,
		purge: `select deleted, last from metered.purge_job_keys($1, metered.clock() - $2::interval, $3)`}
)
