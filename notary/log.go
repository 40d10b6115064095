package notary

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/schema"
)

const perBlock = 60 // hashes of a row of notary_hashes

const blocksSQL = `select block, hashes from metered.notary_hashes where block = any ($1::bigint[])`

// log reads the hashes of the tree, and appends to them.
type log struct {
	ctx    context.Context
	db     querier
	name   schema.Name
	blocks map[int64][]byte // that were read
	size   int64            // leaves
	stored int64            // hashes in the database
	added  []tlog.Hash      // behind them
}

func newLog(ctx context.Context, db querier, name schema.Name, size int64) *log {
	return &log{ctx: ctx, db: db, name: name, blocks: map[int64][]byte{}, size: size,
		stored: tlog.StoredHashCount(size)}
}

// ReadHashes is that of tlog.HashReader.
func (l *log) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	var missing []int64
	for _, index := range indexes {
		if block := index / perBlock; index < l.stored && l.blocks[block] == nil {
			l.blocks[block] = []byte{}
			missing = append(missing, block)
		}
	}
	if len(missing) > 0 {
		if err := l.load(missing); err != nil {
			return nil, err
		}
	}
	hashes := make([]tlog.Hash, len(indexes))
	for i, index := range indexes {
		if index >= l.stored {
			hashes[i] = l.added[index-l.stored]
			continue
		}
		at := int(index%perBlock) * tlog.HashSize
		block := l.blocks[index/perBlock]
		if len(block) < at+tlog.HashSize {
			return nil, fmt.Errorf("hash %d of the log is missing", index)
		}
		hashes[i] = tlog.Hash(block[at : at+tlog.HashSize])
	}
	return hashes, nil
}

func (l *log) load(blocks []int64) error {
	rows, _ := answer.Query(l.ctx, l.db, l.name.SQL(blocksSQL), blocks)
	var block int64
	var hashes []byte
	_, err := pgx.ForEachRow(rows, []any{&block, &hashes}, func() error {
		l.blocks[block] = append([]byte(nil), hashes...)
		return nil
	})
	return err
}

// add appends a leaf.
func (l *log) add(leaf tlog.Hash) error {
	hashes, err := tlog.StoredHashesForRecordHash(l.size, leaf, l)
	l.added = append(l.added, hashes...)
	l.size++
	return err
}

const writeBlocksSQL = `
insert into metered.notary_hashes (block, hashes) select b.block, b.hashes from unnest($1::bigint[], $2::bytea[]) b(block, hashes)
on conflict (block) do update set hashes = excluded.hashes`

// write writes the appended hashes.
func (l *log) write(tx pgx.Tx) error {
	if len(l.added) == 0 {
		return nil
	}
	first := l.stored / perBlock
	var open []byte // of the last block that is there
	if rest := l.stored % perBlock; rest > 0 {
		if _, err := l.ReadHashes([]int64{l.stored - 1}); err != nil {
			return err
		}
		open = l.blocks[first][:rest*tlog.HashSize]
	}
	var numbers []int64
	var blocks [][]byte
	send := func() error {
		_, err := tx.Exec(l.ctx, l.name.SQL(writeBlocksSQL), numbers, blocks)
		numbers, blocks = nil, nil
		return err
	}
	block := append(make([]byte, 0, perBlock*tlog.HashSize), open...)
	for i, hash := range l.added {
		block = append(block, hash[:]...)
		if len(block) == perBlock*tlog.HashSize || i == len(l.added)-1 {
			numbers, blocks = append(numbers, first+int64(len(numbers))), append(blocks, block)
			block = make([]byte, 0, perBlock*tlog.HashSize)
			if len(numbers) == 2000 {
				next := first + int64(len(numbers))
				if err := send(); err != nil {
					return err
				}
				first = next
			}
		}
	}
	if len(numbers) == 0 {
		return nil
	}
	return send()
}
