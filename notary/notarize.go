package notary

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

const (
	lockSQL = `select set_config('lock_timeout', $1::text, true)`

	// Two at once would give two leaves one number.
	alsoLockSQL = `lock table metered.notary_heads in share row exclusive mode`

	headSQL = `
select coalesce((select max(h.size) from metered.notary_heads h), 0), coalesce((select max(s.no) from metered.notary_scopes s), 0),
    metered.clock(), coalesce((select h.head from metered.notary_heads h order by h.size desc limit 1), '')`

	// The scopes behind $1, by skipping from scope to scope in the primary key, and the entries of each that are not
	// in the log. A writer of a scope's next entry has seen the commit of the one before: so what is committed has no gap.
	entriesSQL = `
with recursive s(scope) as (
    (select l.scope from metered.ledger l where l.scope > $1 order by l.scope limit 1)
    union all
    select (select l.scope from metered.ledger l where l.scope > s.scope order by l.scope limit 1) from s where s.scope is not null
)
select s.scope, coalesce(n.no, 0), n.commitment, ` + columns + `
from s
left join lateral (select x.no, x.seq, x.commitment from metered.notary_scopes x where x.scope = s.scope offset 0) n on true
cross join lateral (
    select y.* from metered.ledger y where y.scope = s.scope and y.seq > coalesce(n.seq, 0) order by y.seq limit $2::bigint) l
where s.scope is not null limit $2::bigint`

	scopesSQL = `
insert into metered.notary_scopes (no, seq, commitment, salt, scope)
select x.no, x.seq, x.commitment, x.salt, x.scope from unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bytea[], $5::text[]) x(no, seq, commitment, salt, scope)
on conflict (scope) do update set seq = excluded.seq`

	runsSQL = `
insert into metered.notary_runs (first, entries, seq, scope_no)
select x.first, x.entries, x.seq, x.scope_no from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) x(first, entries, seq, scope_no)`

	signedSQL = `insert into metered.notary_heads (size, signed_at, head) values ($1, $2, $3)`
)

// Notarize takes down all entries that are not in the log yet, and returns the last head that it
// signed, or the one before if there was nothing to take down. Transactions of up to
// Config.MaxEntries sign a head each, and stay if a later one fails. It takes no lock of a scope, and needs
// the schema's owner.
//
// Errors: budget.ErrBusy, if another Notarize is at work.
func (n *Notary) Notarize(ctx context.Context, pool *pgxpool.Pool,
	signer note.Signer) (head Head, err error) {
	if err := cmp.Or(n.made(), fault.NotNil(errArgument, "pool", pool),
		fault.NotNil(errArgument, "signer", signer)); err != nil {
		return Head{}, err
	}
	after, done := "", false
	for !done && err == nil {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: beginSQL},
			func(tx pgx.Tx) (err error) {
				head, after, done, err = n.batch(ctx, tx, signer, after)
				return err
			})
	}
	return head, failed("notarize", err)
}

// scope is a scope with entries to take down.
type scope struct {
	no               int64
	seq              int64
	name             string
	salt, commitment []byte
}

// taking is what one transaction takes down.
type taking struct {
	log                     *log
	scopes                  []scope
	no                      int64   // the last number of a scope
	first, entries, seq, of []int64 // of runs
}

func (n *Notary) batch(ctx context.Context, tx pgx.Tx, signer note.Signer,
	after string) (head Head, last string, done bool, err error) {
	_, err = tx.Exec(ctx, lockSQL, fmt.Sprint(n.lockTimeout.Milliseconds()))
	if err == nil {
		_, err = tx.Exec(ctx, n.name.SQL(alsoLockSQL))
	}
	var size, no int64
	var at time.Time
	if err == nil {
		err = answer.QueryRow(ctx, tx, n.name.SQL(headSQL)).Scan(&size, &no, &at, &head.Note)
	}
	if err != nil {
		return head, after, false, err
	}
	t := &taking{log: newLog(ctx, tx, n.name, size), no: no}
	taken, err := t.read(ctx, tx, n, after)
	if err != nil {
		return head, after, false, err
	}
	if t.log.size == size && head.Note != "" {
		head, err = n.known(ctx, tx, head.Note, size)
		return head, after, true, err
	}
	if err := t.write(ctx, tx, n); err != nil {
		return head, after, false, err
	}
	root, err := tlog.TreeHash(t.log.size, t.log)
	if err == nil {
		head, err = sign(t.log.size, root, at, signer)
	}
	if err == nil {
		_, err = tx.Exec(ctx, n.name.SQL(signedSQL), head.Size, at, head.Note)
	}
	if len(t.scopes) > 1 { // the last one may have more
		after = t.scopes[len(t.scopes)-2].name
	}
	return head, after, taken < n.entries, err
}

// known is the last head, as it was stored.
func (n *Notary) known(ctx context.Context, tx pgx.Tx, signed string, size int64) (Head, error) {
	root, err := tlog.TreeHash(size, newLog(ctx, tx, n.name, size))
	h := Head{Size: size, Root: root, Note: signed}
	if err == nil {
		err = answer.QueryRow(ctx, tx, n.name.SQL(`select h.signed_at from metered.notary_heads h where h.size = $1`), size).Scan(&h.At)
	}
	return h, err
}

func (t *taking) read(ctx context.Context, tx pgx.Tx, n *Notary,
	after string) (taken int, err error) {
	// The hashes to the left of the new ones, before the connection is in use.
	if _, err := tlog.TreeHash(t.log.size, t.log); err != nil {
		return 0, err
	}
	if rest := t.log.stored; rest > 0 {
		if _, err := t.log.ReadHashes([]int64{rest - 1}); err != nil {
			return 0, err
		}
	}
	var s scope
	var e entry
	seen := map[string]bool{}
	buffer := make([]byte, 0, 512)
	rows, _ := answer.Query(ctx, tx, n.name.SQL(entriesSQL), after, n.entries)
	_, err = pgx.ForEachRow(rows, append([]any{&s.name, &s.no, &s.commitment}, e.scan()...),
		func() error {
			if taken++; len(t.scopes) == 0 || t.scopes[len(t.scopes)-1].name != s.name {
				if seen[s.name] {
					return errors.New("the entries came in another order than that of scopes")
				}
				seen[s.name] = true
				if err := t.begin(s); err != nil {
					return err
				}
			}
			of := &t.scopes[len(t.scopes)-1]
			if i := len(t.first) - 1; i >= 0 && t.of[i] == of.no && e.seq == of.seq+1 {
				t.entries[i]++
			} else {
				t.first, t.entries, t.seq, t.of = append(t.first, t.log.size), append(t.entries, 1),
					append(t.seq, e.seq), append(t.of, of.no)
			}
			of.seq = e.seq
			e.commitment = of.commitment
			return t.log.add(e.hash(buffer))
		})
	return taken, err
}

// begin begins with the entries of a scope.
func (t *taking) begin(s scope) error {
	s.commitment = append([]byte(nil), s.commitment...)
	s.seq = -1
	if s.no == 0 {
		t.no++
		s.no, s.salt = t.no, make([]byte, saltBytes)
		if _, err := rand.Read(s.salt); err != nil {
			return err
		}
		s.commitment = commit(s.salt, s.name)
	}
	t.scopes = append(t.scopes, s)
	return nil
}

func (t *taking) write(ctx context.Context, tx pgx.Tx, n *Notary) error {
	if err := t.log.write(tx); err != nil {
		return err
	}
	var no, seq []int64
	var commitments, salts [][]byte
	var names []string
	for _, s := range t.scopes {
		no, seq, names = append(no, s.no), append(seq, s.seq), append(names, s.name)
		commitments, salts = append(commitments, s.commitment), append(salts, s.salt)
	}
	_, err := tx.Exec(ctx, n.name.SQL(scopesSQL), no, seq, commitments, salts, names)
	if err == nil {
		_, err = tx.Exec(ctx, n.name.SQL(runsSQL), t.first, t.entries, t.seq, t.of)
	}
	return err
}
