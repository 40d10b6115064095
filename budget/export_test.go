package budget

import (
	"context"
	"iter"
)

// Search is Entries with options that search, of which a statement looks at up to look entries.
func Search(ctx context.Context, l *Ledger, db Querier, scope string, opts EntriesOptions,
	look int) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		after, before, err := l.between(ctx, db, scope, opts)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		l.search(ctx, db, scope, after, before, opts, look, yield)
	}
}
