package notary

import (
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"time"

	"golang.org/x/mod/sumdb/tlog"
)

// entry is what the log has of an entry. What an entry says of persons, its note and its operation, is
// not in it, and neither is the name of its scope: a commitment stands for that.
type entry struct {
	commitment                      []byte
	seq, amount                     int64
	spent, refunded, credited, held int64
	at                              time.Time
	epoch                           int64
	kind                            string
	ref                             *int64
}

// columns are those of a metered.ledger l, as scan takes them.
const columns = `l.seq, l.amount, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.kind::text, l.ref`

func (e *entry) scan() []any {
	return []any{&e.seq, &e.amount, &e.at, &e.spent, &e.refunded, &e.credited, &e.held, &e.epoch,
		&e.kind, &e.ref}
}

// record is the text of a leaf. The second line stands for the scope. The third has the entry's
// number, kind, amount, time in microseconds since 1970 and epoch, the sums after it (spent, refunded,
// credited, held), and of a refund the number of its charge.
func (e *entry) record(b []byte) []byte {
	b = append(b, "metered entry v1\n"...)
	b = base64.StdEncoding.AppendEncode(b, e.commitment)
	b = append(b, '\n')
	b = strconv.AppendInt(b, e.seq, 10)
	b = append(b, ' ')
	b = append(b, e.kind...)
	for _, n := range []int64{e.amount, e.at.UnixMicro(), e.epoch, e.spent, e.refunded, e.credited,
		e.held} {
		b = append(b, ' ')
		b = strconv.AppendInt(b, n, 10)
	}
	b = append(b, ' ')
	if e.ref == nil {
		b = append(b, '-')
	} else {
		b = strconv.AppendInt(b, *e.ref, 10)
	}
	return append(b, '\n')
}

func (e *entry) hash(buffer []byte) tlog.Hash { return tlog.RecordHash(e.record(buffer[:0])) }

const saltBytes = 32

// commit is what stands for a scope's name: whoever has neither salt nor name learns nothing from it.
func commit(salt []byte, scope string) []byte {
	sum := sha256.Sum256(append(append(make([]byte, 0, saltBytes+maxScope), salt...), scope...))
	return sum[:]
}
