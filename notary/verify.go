package notary

import (
	"bytes"
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Report says what Verify found.
type Report struct {
	// Head is the head that the ledger was compared with.
	Head Head `json:"head"`

	// Checked are the entries that are as they were when they were taken down.
	Checked int64 `json:"checked"`

	// Purged are entries that are gone from behind the first entry of their scope, as a purge takes
	// them. The sums in the entries that were kept are checked.
	Purged int64 `json:"purged"`

	// Moved are entries of tenants that have moved to another cell.
	Moved int64 `json:"moved"`

	// Renamed are scopes whose name was taken out: nothing shows which name they had.
	Renamed int64 `json:"renamed"`

	// Later are entries that the log has behind the head.
	Later int64 `json:"later"`

	// Differences are what is not as it was: 1,000 at most.
	Differences []Difference `json:"differences"`
}

// Difference is what is not as it was when it was taken down.
type Difference struct {
	// Scope is the scope, as far as it is known.
	Scope string `json:"scope,omitempty"`

	// Seq is the first entry that differs, or 0.
	Seq int64 `json:"seq,omitempty"`

	// What says what differs.
	What string `json:"what"`
}

const (
	maxDifferences = 1000
	window         = 100_000 // leaves that are compared at a time
)

const (
	sizeSQL = `select coalesce(max(h.size), 0) from metered.notary_heads h`

	leavesSQL = `select block, hashes from metered.notary_hashes where block between $1 and $2 order by block`

	// The leaves from $1 to before $2, with the entries that are there.
	comparedSQL = `
select greatest(r.first, $1::bigint), least(r.first + r.entries, $2::bigint), r.seq - r.first, r.scope_no, coalesce(s.scope, ''),
    coalesce(s.commitment, ''), l.seq is not null, coalesce(l.seq, 0), coalesce(l.amount::bigint, 0), coalesce(l.at, '2000-01-01Z'), coalesce(l.spent, 0),
    coalesce(l.refunded, 0), coalesce(l.credited, 0), coalesce(l.held, 0), coalesce(l.epoch, 0), coalesce(l.kind::text, ''), l.ref
from metered.notary_runs r
left join metered.notary_scopes s on s.no = r.scope_no
left join metered.ledger l on l.scope = s.scope
    and l.seq >= r.seq + greatest($1::bigint - r.first, 0) and l.seq < r.seq + least(r.entries, $2::bigint - r.first)
where r.first >= coalesce((select max(x.first) from metered.notary_runs x where x.first <= $1::bigint), 0) and r.first < $2::bigint
    and r.first + r.entries > $1::bigint
order by r.first, l.seq`

	// What is there of scopes of which entries are missing: the first entry behind entry 1, and the last one. They may be in
	// another cell.
	keptSQL = `
select n.no, coalesce(s.scope, ''), coalesce((select min(l.seq) from metered.ledger l where l.scope = s.scope and l.seq > 1), 0),
    coalesce((select max(l.seq) from metered.ledger l where l.scope = s.scope), 0),
    exists (select from metered.tenants t where (t.tenant = s.scope or starts_with(s.scope, t.tenant || '/'))
        and t.cell <> (select c.no from metered.cell c where c.one))
from unnest($1::bigint[]) n(no) left join metered.notary_scopes s on s.no = n.no`

	namesSQL = `select s.scope, s.commitment, s.salt from metered.notary_scopes s`
)

// Verify compares the ledger with a head that was kept elsewhere, whose signature verifier checks:
// it computes each leaf before the head from its entry, and the head from the leaves. So it finds an
// entry that was changed, cut off or removed, and a log that was changed with it. It takes no lock,
// sees one moment, and needs metered.GrantReportingSQL.
//
// Errors: ErrHead. A difference is no error.
func (n *Notary) Verify(ctx context.Context, pool *pgxpool.Pool, head []byte,
	verifier note.Verifier) (Report, error) {
	if err := cmp.Or(n.made(), fault.NotNil(errArgument, "pool", pool),
		fault.NotNil(errArgument, "verifier", verifier)); err != nil {
		return Report{}, err
	}
	opened, err := open(head, verifier)
	if err != nil {
		return Report{}, err
	}
	v := &verifying{Notary: n, ctx: ctx, report: Report{Head: opened, Differences: []Difference{}},
		missing: map[int64][][2]int64{}}
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: beginReadSQL}, v.run)
	return v.report, failed("verify", err)
}

// verifying is one call of Verify.
type verifying struct {
	*Notary
	ctx     context.Context
	tx      pgx.Tx
	report  Report
	next    int64                // the leaf up to which runs have come
	missing map[int64][][2]int64 // of scopes by number: from which entry to before which
}

func (v *verifying) differs(scope string, seq int64, format string, args ...any) {
	if len(v.report.Differences) < maxDifferences {
		v.report.Differences = append(v.report.Differences,
			Difference{scope, seq, fmt.Sprintf(format, args...)})
	}
}

func (v *verifying) run(tx pgx.Tx) error {
	v.tx = tx
	head := v.report.Head
	var size int64
	if err := answer.QueryRow(v.ctx, tx, v.name.SQL(sizeSQL)).Scan(&size); err != nil {
		return err
	}
	v.report.Later = max(0, size-head.Size)
	var tree stack
	for from := int64(0); from < head.Size; from += window {
		to := min(from+window, head.Size)
		leaves, err := v.leaves(from, to)
		if err == nil && int64(len(leaves)) < to-from {
			v.differs("", 0, "the log has hashes of %d entries, and the head has %d",
				from+int64(len(leaves)), head.Size)
			return nil
		}
		for _, leaf := range leaves {
			tree.add(leaf)
		}
		if err == nil {
			err = v.compare(from, to, leaves)
		}
		if err != nil {
			return err
		}
	}
	if head.Size > 0 && tree.root() != head.Root {
		v.differs("", 0, "the hashes of the log are not those of the head: what follows may be as wrong as they are")
	}
	v.covered(head.Size)
	if err := v.gone(); err != nil {
		return err
	}
	return v.names()
}

// leaves are the hashes of leaves, as the log has them, as far as it does.
func (v *verifying) leaves(from, to int64) ([]tlog.Hash, error) {
	first := tlog.StoredHashIndex(0, from) / perBlock
	last := tlog.StoredHashIndex(0, to-1) / perBlock
	rows, _ := answer.Query(v.ctx, v.tx, v.name.SQL(leavesSQL), first, last)
	leaves := make([]tlog.Hash, 0, to-from)
	var block int64
	var hashes []byte
	_, err := pgx.ForEachRow(rows, []any{&block, &hashes}, func() error {
		for leaf := from + int64(len(leaves)); leaf < to; leaf++ {
			index := tlog.StoredHashIndex(0, leaf)
			at := int(index%perBlock) * tlog.HashSize
			if index/perBlock != block || len(hashes) < at+tlog.HashSize {
				break
			}
			leaves = append(leaves, tlog.Hash(hashes[at:at+tlog.HashSize]))
		}
		return nil
	})
	return leaves, err
}

// covered notes leaves that belong to no run.
func (v *verifying) covered(upTo int64) {
	if v.next < upTo {
		v.differs("", 0, "entries %d to %d of the log belong to no scope", v.next+1, upTo)
		v.next = upTo
	}
}

// compare compares entries with their leaves.
func (v *verifying) compare(from, to int64, leaves []tlog.Hash) error {
	var begin, end, offset, no int64
	var name string
	var there bool
	var e entry
	buffer := make([]byte, 0, 512)
	run := int64(-1) // the beginning of the run that is being read
	expected, last, of, by := int64(0), int64(0), int64(0), int64(0)
	finish := func() {
		if run >= 0 {
			v.lost(of, expected+by, last+by)
		}
	}
	rows, _ := answer.Query(v.ctx, v.tx, v.name.SQL(comparedSQL), from, to)
	targets := append([]any{&begin, &end, &offset, &no, &name, &e.commitment, &there}, e.scan()...)
	_, err := pgx.ForEachRow(rows, targets, func() error {
		if begin != run {
			finish()
			v.covered(begin)
			run, expected, last, of, by = begin, begin, end, no, offset
			v.next = max(v.next, end)
		}
		if !there {
			return nil
		}
		leaf := e.seq - offset
		v.lost(no, expected+offset, e.seq)
		expected = leaf + 1
		if e.hash(buffer) == leaves[leaf-from] {
			v.report.Checked++
		} else {
			v.differs(name, e.seq, "the entry is not as it was")
		}
		return nil
	})
	finish()
	return err
}

// lost notes entries of a scope that are not there.
func (v *verifying) lost(no, from, to int64) {
	if from >= to {
		return
	}
	ranges := v.missing[no]
	if i := len(ranges) - 1; i >= 0 && ranges[i][1] == from {
		ranges[i][1] = to
		return
	}
	v.missing[no] = append(ranges, [2]int64{from, to})
}

// gone tells what was purged or has moved from what was cut off or removed.
func (v *verifying) gone() error {
	var all []int64
	for no := range v.missing {
		all = append(all, no)
	}
	var no, first, last int64
	var name string
	var moved bool
	rows, _ := answer.Query(v.ctx, v.tx, v.name.SQL(keptSQL), all)
	_, err := pgx.ForEachRow(rows, []any{&no, &name, &first, &last, &moved}, func() error {
		for _, missing := range v.missing[no] {
			from, to := missing[0], missing[1]
			switch {
			case moved && last == 0:
				v.report.Moved += to - from
			case last == 0:
				v.differs(name, from, "the scope was removed, with entries %d to %d", from, to-1)
			case from > last:
				v.differs(name, from, "entries %d to %d were cut off", from, to-1)
			case from > 1 && to <= first:
				v.report.Purged += to - from
			default:
				v.differs(name, from, "entries %d to %d were removed", from, to-1)
			}
		}
		return nil
	})
	return err
}

// names compares the scopes' names with what stands for them.
func (v *verifying) names() error {
	var name string
	var commitment, salt []byte
	rows, _ := answer.Query(v.ctx, v.tx, v.name.SQL(namesSQL))
	_, err := pgx.ForEachRow(rows, []any{&name, &commitment, &salt}, func() error {
		if salt == nil {
			v.report.Renamed++
		} else if !bytes.Equal(commit(salt, name), commitment) {
			v.differs(name, 0, "the scope had another name")
		}
		return nil
	})
	return err
}

// stack computes the root of a tree, leaf by leaf.
type stack []subtree

type subtree struct {
	level int
	hash  tlog.Hash
}

func (s *stack) add(leaf tlog.Hash) {
	all := append(*s, subtree{0, leaf})
	for n := len(all); n > 1 && all[n-1].level == all[n-2].level; n = len(all) {
		all = append(all[:n-2], subtree{all[n-1].level + 1,
			tlog.NodeHash(all[n-2].hash, all[n-1].hash)})
	}
	*s = all
}

func (s stack) root() (hash tlog.Hash) {
	for i := len(s) - 1; i >= 0; i-- {
		if i == len(s)-1 {
			hash = s[i].hash
		} else {
			hash = tlog.NodeHash(s[i].hash, hash)
		}
	}
	return hash
}
