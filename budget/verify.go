package budget

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
)

// VerifyOptions says what Verify checks. The zero value checks all scopes.
type VerifyOptions struct {
	// Scope checks this scope alone. Defaults to all scopes.
	Scope string

	// After goes on behind an earlier check: its VerifyReport.Last.
	After string

	// MaxDifferences ends the check once so many differences are found. Defaults to 1,000.
	MaxDifferences int

	// Progress is called for each scope and each 10,000 entries, with the report so far. It may be
	// nil.
	Progress func(VerifyReport)
}

// VerifyReport has the findings of Verify.
type VerifyReport struct {
	// Scopes is how many scopes were checked.
	Scopes int `json:"scopes"`

	// Entries is how many entries were checked.
	Entries int64 `json:"entries"`

	// Differences are the wrong values that were found. A ledger that adds up has none.
	Differences []Difference `json:"differences,omitempty"`

	// Last is the last scope that was checked to its end.
	Last string `json:"last,omitempty"`
}

// Difference is a wrong value.
type Difference struct {
	// Scope is the scope whose history has the wrong value.
	Scope string `json:"scope"`

	// Seq is the wrong entry. For a sum of refunds it is the first charge of its block.
	Seq int64 `json:"seq"`

	// Field is what differs, such as "spent". It is "amount" if the amount was edited, or the sums
	// of the last entry.
	Field string `json:"field"`

	// Got is the stored value.
	Got string `json:"got"`

	// Want is the right value.
	Want string `json:"want"`
}

const chainPage = 10_000

const chainSQL = `
select seq, kind::text, amount, at, epoch, spent, refunded, credited, held, coalesce(ref, 0), coalesce(hold, '')
from metered.ledger
where scope = $1 and seq > $2
order by seq
limit $3`

// refundSumsSQL compares the sums kept of refunds with the refunds themselves,
// for blocks that begin at or after entry $2, where no purge took anything.
const refundSumsSQL = `
with entries as (
    select lv as level, l.ref >> (4 * lv) as block, sum(l.amount) as amount
    from metered.ledger l, generate_series(0, 15) lv
    where l.scope = $1 and l.kind = 'r' and l.ref >= $2 and (lv = 0 or l.ref >> (4 * lv) > 0)
    group by lv, l.ref >> (4 * lv)
), sums as (
    select level::int, block, amount from metered.refund_sum where scope = $1
)
select level, block, coalesce(s.amount, 0)::bigint, coalesce(e.amount, 0)::bigint
from entries e full join sums s using (level, block)
where s.amount is distinct from e.amount and block << (4 * level) >= $2
order by level, block`

// refundedSQL finds entries, from $2 on, of which more was refunded than they charged.
const refundedSQL = `
select c.seq, sum(r.amount)::bigint, case when c.kind in ('c', 'u') then c.amount else 0 end
from metered.ledger r join metered.ledger c on c.scope = r.scope and c.seq = r.ref
where r.scope = $1 and r.kind = 'r' and r.ref >= $2
group by c.seq, c.kind, c.amount
having sum(r.amount) > case when c.kind in ('c', 'u') then c.amount else 0 end
order by c.seq`

// heldSQL sums the units of a scope that the open lines of holds, and open leases, keep. Lines that
// were freed with a sum are left out: they are due before next_due, at the last entry's time or
// before (expiry.sql). A line that keeps less than nothing, or of which less than nothing was
// captured, counts as a difference of its own. Beside that, the sum kept of the open leases.
const heldSQL = `
select coalesce(sum(l.open) filter (where not exists (
        select from (select * from metered.ledger t where t.scope = $1 order by t.seq desc limit 1) t
        where (l.due >= t.next_due) is not true and l.due <= t.at)), 0)::bigint,
    (select coalesce(sum(y.granted), 0) from metered.leases y where y.scope = $1 and y.settled_at is null and y.mode <> 'g')::bigint,
    coalesce((select s.granted from metered.lease_sum s where s.scope = $1), 0),
    count(*) filter (where l.open < 0 or l.captured < 0 or l.amount < 1)
from metered.hold_lines l where l.scope = $1 and (l.open <> 0 or l.captured < 0)`

// leasesSQL finds leases that captured another amount than was spent of them, or more than they
// held. A purge takes spends before their lease, oldest lease first, so the oldest one may have
// lost some.
const leasesSQL = `
select l.no, l.opened_seq, l.spent, coalesce(s.units, 0)::bigint, l.granted
from metered.leases l, lateral (select sum(x.amount) as units from metered.lease_spends x where x.lease = l.no) s
where l.scope = $1 and l.mode = 's' and (l.settled_at is not null and l.spent <> coalesce(s.units, 0)
        and (l.spent < s.units or l.settled_at > (select min(y.settled_at) from metered.leases y where y.settled_at is not null))
    or l.settled_at is null and s.units > l.granted or l.spent > l.granted)
order by l.no`

// anchorsSQL compares anchors with the entries, of their epoch and from $2 on, that they were read
// from.
const anchorsSQL = `
select l.seq, l.anchor_spent, b.spent
from metered.ledger l,
     lateral (select y.seq from metered.ledger y
      where y.scope = l.scope and y.epoch = l.epoch and y.at <= l.anchor_at and (y.seq & 15 = 1 or y.kind = 'k')
      order by y.at desc, y.seq desc limit 1) x,
     lateral (select y.seq, y.spent from metered.ledger y
      where y.scope = l.scope and y.seq between x.seq and x.seq + 15 and y.epoch = l.epoch and y.at <= l.anchor_at
      order by y.seq desc limit 1) b
where l.scope = $1 and l.seq >= $2 and l.anchor_at is not null and b.seq >= $2 and b.spent <> l.anchor_spent
order by l.seq`

// carvedSQL finds leases of a scope whose child was closed, and spent something else than they
// captured.
const carvedSQL = `
select l.no, l.opened_seq, l.spent, t.spent - t.refunded, null::bigint
from metered.leases l, lateral (select * from metered.ledger y where y.scope = l.child order by y.seq desc limit 1) t
where l.scope = $1 and l.mode in ('c', 'g') and l.settled_at is not null and t.next_due = '-infinity' and l.spent <> t.spent - t.refunded
order by l.no`

// talliesSQL finds tallies that no writer would fold, since the last entry does not say that there are some.
const talliesSQL = `
select t.seq, count(*), 0::bigint
from metered.tallies x, lateral (select * from metered.ledger y where y.scope = x.scope order by y.seq desc limit 1) t
where x.scope = $1 and (t.tallied and t.lots_end is null and x.amount > 0) is not true
group by t.seq`

// chargesSQL compares how many charges each entry is counted as with its kind. The capture after an
// excess is counted with it, and the capture of a lease as the spends that no purge took, or as one
// by a call of version 1 that waited for the upgrade and went on after it.
const chargesSQL = `
select x.seq, x.got, x.want
from (select c.seq, c.got, case when c.others = 9223372036854775807 then c.got
        when c.kind not in ('c', 'u') then 0
        when c.hold like 'lease/%' and c.got = 1 then 1
        when c.hold like 'lease/%' then coalesce((
            select case when c.kind = 'c' then 0 when y.mode <> 's' then 1
                when y.settled_at > (select min(z.settled_at) from metered.leases z where z.settled_at is not null) then s.spends
                else greatest(s.spends, c.got) end
            from metered.leases y, lateral (select count(*) as spends from metered.lease_spends s where s.lease = y.no) s
            where y.scope = $1 and c.hold = 'lease/' || y.no and c.seq between y.settled_seq - 2 and y.settled_seq), c.got)
        when c.got = 0 and c.kind = 'u' and exists (select from metered.ledger e
            where e.scope = $1 and e.seq between c.seq - 1000 and c.seq - 1 and e.kind = 'c' and e.hold = c.hold and e.at = c.at) then 0
        else 1 end as want
    from (select l.seq, l.kind, l.hold, l.at, l.others,
            case when lag(l.seq, 1, 0::bigint) over w = l.seq - 1 then n.upto - lag(n.upto, 1, 0::bigint) over w end as got
          from metered.ledger l, lateral (
              select l.seq - coalesce(int8smaller(l.others, l.seq), 0) as upto) n
          where l.scope = $1 window w as (order by l.seq)) c) x
where x.got <> x.want
order by x.seq`

// beginVerifySQL keeps operators and functions that somebody has created out of a report.
const beginVerifySQL = `begin isolation level repeatable read, read only; set local search_path = pg_catalog, pg_temp; set local jit = off`

// Verify recomputes entries, refunds, holds, leases and lots (docs/operations.md), each scope in
// one snapshot. A difference is no error. Findings come with an error, too.
func (l *Ledger) Verify(ctx context.Context, pool *pgxpool.Pool, opts VerifyOptions) (VerifyReport, error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return VerifyReport{}, err
	}
	v := verification{ledger: l, opts: opts}
	if v.opts.MaxDifferences < 0 {
		return v.report, invalid("VerifyOptions.MaxDifferences", "%d is negative", opts.MaxDifferences)
	}
	if opts.Scope != "" {
		if err := checkScope("VerifyOptions.Scope", opts.Scope); err != nil {
			return v.report, err
		}
	}
	if opts.After != "" {
		if err := checkScope("VerifyOptions.After", opts.After); err != nil {
			return v.report, err
		}
	}
	if v.opts.MaxDifferences == 0 {
		v.opts.MaxDifferences = 1000
	}
	one := func(scope string) error {
		if v.full() {
			return nil
		}
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: beginVerifySQL},
			func(tx pgx.Tx) error { return v.scope(ctx, tx, scope) })
	}
	if opts.Scope == "" {
		err := l.eachScope(ctx, pool, opts.After, one)
		return v.report, err
	}
	err := one(opts.Scope)
	return v.report, err
}

type verification struct {
	ledger *Ledger
	opts   VerifyOptions
	report VerifyReport
	edited *edited  // the entry before, if its amount may have been edited
	wrong  bool     // sums of the entry before are wrong
	known  []string // the zones of the server, once they were asked for
}

func (v *verification) full() bool { return len(v.report.Differences) >= v.opts.MaxDifferences }

func (v *verification) progress() {
	if v.opts.Progress != nil {
		v.opts.Progress(v.report)
	}
}

func (v *verification) differs(e Entry, field string, got, want any) {
	if !v.full() {
		v.report.Differences = append(v.report.Differences,
			Difference{Scope: e.Scope, Seq: e.Seq, Field: field, Got: fmt.Sprint(got), Want: fmt.Sprint(want)})
	}
}

func (v *verification) scope(ctx context.Context, tx pgx.Tx, scope string) error {
	prev := Entry{Scope: scope, At: time.Time{}}
	v.edited, v.wrong = nil, false
	first := int64(1) // the first entry of the unbroken chain
	closed := false
	for n := chainPage; n == chainPage && !v.full(); {
		rows, err := answer.Query(ctx, tx, v.ledger.sql.chain, scope, prev.Seq, chainPage)
		if err != nil {
			return failed("verify", err)
		}
		page, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Entry, error) {
			e := Entry{Scope: scope}
			var kind string
			err := row.Scan(&e.Seq, &kind, &e.Amount, &e.At, &e.Epoch, &e.Spent, &e.Refunded,
				&e.Credited, &e.Held, &e.Ref, &e.Hold)
			e.Kind = kinds[kind]
			return e, err
		})
		if err != nil {
			return failed("verify", err)
		}
		for _, e := range page {
			if prev.Seq == 1 && e.Seq > 2 && e.Seq%16 == 1 {
				first = e.Seq // a purge left entry 1 and a baseline
				v.decide(false)
			} else {
				v.entry(prev, e)
			}
			// In a closed scope, only earlier holds end and are captured. Its lots end, and one may
			// go on in another: a credit after its rollover.
			goesOn := e.Kind == EntryCredit && prev.Kind == EntryRollOver && prev.Amount == e.Amount
			if closed && (e.Kind == EntryHold || e.Kind == EntryCredit && !goesOn ||
				e.Kind == EntryRefund || e.Kind == EntryClose || e.Kind == EntryCharge &&
				e.Hold == "") {
				v.differs(e, "kind", e.Kind, "one that ends what was held: the scope is closed")
			}
			closed = closed || e.Kind == EntryClose
			prev = e
		}
		n = len(page)
		v.report.Entries += int64(n)
		if n == chainPage {
			v.progress()
		}
	}
	v.decide(false) // nothing says which of the two was edited
	if err := cmp.Or(v.pairs(ctx, tx, "anchor", v.ledger.sql.anchors, scope, first),
		v.pairs(ctx, tx, "tallies", v.ledger.sql.tallies, scope),
		v.pairs(ctx, tx, "charges", v.ledger.sql.charges, scope)); err != nil {
		return err
	}
	if err := v.refundSums(ctx, tx, scope, first); err != nil {
		return err
	}
	if err := cmp.Or(v.held(ctx, tx, prev), v.leases(ctx, tx, scope, v.ledger.sql.leases),
		v.leases(ctx, tx, scope, v.ledger.sql.carved),
		v.lots(ctx, tx, scope, first)); err != nil {
		return err
	}
	v.report.Scopes++
	if !v.full() {
		v.report.Last = scope
	}
	v.progress()
	return nil
}

// edited is an entry whose sums do not follow from its amount. They would from the amount want.
type edited struct {
	entry Entry
	want  int64
	sums  []Difference
}

// entry checks e against the entry before it, which is zero for the first one.
func (v *verification) entry(prev, e Entry) {
	want, known := following(prev, e)
	if !known {
		v.differs(e, "kind", e.Kind, "a known kind")
	}
	if e.Kind == EntryRefund && (e.Ref < 1 || e.Ref >= e.Seq) {
		v.differs(e, "ref", e.Ref, "an earlier entry")
	}
	if before := e.At.Before(prev.At); before != (e.Kind == EntryClockRepair) {
		want := map[bool]string{true: "not before ", false: "before "}[before]
		v.differs(e, "at", e.At, want+prev.At.String())
	}
	var wrong []Difference
	negative := false
	for _, sum := range []struct {
		field     string
		got, want int64
	}{
		{"seq", e.Seq, want.Seq}, {"epoch", int64(e.Epoch), int64(want.Epoch)}, {"spent", e.Spent, want.Spent},
		{"refunded", e.Refunded, want.Refunded}, {"credited", e.Credited, want.Credited},
		{"held", e.Held, want.Held},
	} {
		switch {
		case sum.got != sum.want:
			wrong = append(wrong, Difference{e.Scope, e.Seq, sum.field, fmt.Sprint(sum.got),
				fmt.Sprint(sum.want)})
		case sum.got < 0:
			v.differs(e, sum.field, sum.got, "0 or more")
			negative = true
		}
	}
	v.sums(prev, e, wrong)
	v.wrong = v.wrong || negative
	if e.Refunded > e.Spent {
		v.differs(e, "refunded", e.Refunded, fmt.Sprintf("at most %d, which was spent", e.Spent))
	}
}

// following is the entry before e with the sums that e should have.
func following(prev, e Entry) (want Entry, known bool) {
	want = prev
	want.Seq++
	switch e.Kind {
	case EntryCharge:
		want.Spent += e.Amount
	case EntryCredit:
		want.Credited += e.Amount
	case EntryLapse, EntryRevoke, EntryRollOver:
		want.Credited -= e.Amount
	case EntryRefund:
		want.Refunded += e.Amount
	case EntryHold:
		want.Held += e.Amount
	case EntryCapture:
		want.Spent += e.Amount
		want.Held -= e.Amount
	case EntryRelease, EntryExpire:
		want.Held -= e.Amount
	case EntryClose, EntrySchedule:
	case EntryClockRepair:
		want.Epoch++
	default:
		return want, false
	}
	return want, true
}

// sums reports sums of e that are wrong. If its amount was edited, its sums and those of the next
// entry are right: so that is decided there. If a sum was edited, the next entry's differs by as
// much the other way.
func (v *verification) sums(prev, e Entry, wrong []Difference) {
	was := v.edited
	as := e
	as.Amount = max(distance(e.Spent, prev.Spent), distance(e.Refunded, prev.Refunded),
		distance(e.Credited, prev.Credited), distance(e.Held, prev.Held))
	want, _ := following(prev, as)
	fits := as.Amount >= 1 && want.Seq == e.Seq && want.Epoch == e.Epoch && want.Spent == e.Spent &&
		want.Refunded == e.Refunded && want.Credited == e.Credited && want.Held == e.Held
	back := was != nil && as.Amount-e.Amount == was.entry.Amount-was.want
	v.decide(len(wrong) == 0 || fits && !back)
	if len(wrong) > 0 && fits && !back && !v.wrong {
		v.edited = &edited{e, as.Amount, wrong}
		return
	}
	v.wrong = len(wrong) > 0
	v.amount(e)
	v.add(wrong)
}

// decide reports the entry whose amount may have been edited: its amount, or its sums.
func (v *verification) decide(amount bool) {
	was := v.edited
	if v.edited = nil; was == nil {
		return
	}
	if amount {
		v.wrong = false
		v.differs(was.entry, "amount", was.entry.Amount, was.want)
		return
	}
	v.wrong = true
	v.amount(was.entry)
	v.add(was.sums)
}

func (v *verification) amount(e Entry) {
	if (e.Amount < 1) != (e.Kind == EntryClockRepair || e.Kind == EntryClose) && e.Kind != EntrySchedule {
		v.differs(e, "amount", e.Amount, "1 or more, 0 for a clock repair and a close")
	}
}

func (v *verification) add(all []Difference) {
	for _, d := range all {
		v.differs(Entry{Scope: d.Scope, Seq: d.Seq}, d.Field, d.Got, d.Want)
	}
}

func distance(a, b int64) int64 { return max(a-b, b-a) }

// held compares the held units of the last entry with the lines of holds and with open leases, and
// these with their sum.
func (v *verification) held(ctx context.Context, tx pgx.Tx, last Entry) error {
	var open, leased, sum, wrong int64
	if err := answer.QueryRow(ctx, tx, v.ledger.sql.held, pgx.QueryExecModeExec,
		last.Scope).Scan(&open, &leased, &sum, &wrong); err != nil {
		return failed("verify holds", err)
	}
	if open+leased != last.Held {
		v.differs(last, "units of open holds", open+leased, last.Held)
	}
	if sum != leased {
		v.differs(last, "sum of open leases", sum, leased)
	}
	if wrong > 0 {
		v.differs(last, "hold lines", fmt.Sprintf("negative in %d", wrong), "none negative")
	}
	return nil
}

// leases compares the captures of leases with their spends, or with the spends of their child.
func (v *verification) leases(ctx context.Context, tx pgx.Tx, scope, sql string) error {
	rows, err := answer.Query(ctx, tx, sql, pgx.QueryExecModeExec, scope)
	if err != nil {
		return failed("verify leases", err)
	}
	var no, seq, spent int64
	var captured, granted *int64
	_, err = pgx.ForEachRow(rows, []any{&no, &seq, &captured, &spent, &granted}, func() error {
		at, most := Entry{Scope: scope, Seq: seq}, spent
		if captured != nil && *captured != spent {
			v.differs(at, fmt.Sprintf("captured for lease %d", no), *captured, spent)
			most = max(most, *captured)
		}
		if granted != nil && most > *granted {
			v.differs(at, fmt.Sprintf("units spent from lease %d", no), most,
				fmt.Sprintf("at most the %d that it was granted", *granted))
		}
		return nil
	})
	return failed("verify leases", err)
}

// pairs reports each row of a query as a difference of a field: entry, got and want.
func (v *verification) pairs(ctx context.Context, tx pgx.Tx, field, sql, scope string, args ...any) error {
	rows, err := answer.Query(ctx, tx, sql, append([]any{scope}, args...)...)
	if err != nil {
		return failed("verify "+field, err)
	}
	var seq, got, want int64
	_, err = pgx.ForEachRow(rows, []any{&seq, &got, &want}, func() error {
		v.differs(Entry{Scope: scope, Seq: seq}, field, got, want)
		return nil
	})
	return failed("verify "+field, err)
}

func (v *verification) refundSums(ctx context.Context, tx pgx.Tx, scope string, first int64) error {
	rows, err := answer.Query(ctx, tx, v.ledger.sql.refundSums, scope, first)
	if err != nil {
		return failed("verify refunds", err)
	}
	var level, block, got, want int64
	_, err = pgx.ForEachRow(rows, []any{&level, &block, &got, &want}, func() error {
		v.differs(Entry{Scope: scope, Seq: block << (4 * level)},
			fmt.Sprintf("refund sum of level %d", level), got, want)
		return nil
	})
	if err != nil {
		return failed("verify refunds", err)
	}
	rows, err = answer.Query(ctx, tx, v.ledger.sql.refunded, scope, first)
	if err != nil {
		return failed("verify refunds", err)
	}
	var seq int64
	_, err = pgx.ForEachRow(rows, []any{&seq, &got, &want}, func() error {
		v.differs(Entry{Scope: scope, Seq: seq}, "refunds", got, fmt.Sprintf("at most %d", want))
		return nil
	})
	return failed("verify refunds", err)
}
