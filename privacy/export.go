package privacy

import (
	"cmp"
	"context"
	stdjson "encoding/json"
	"fmt"
	"iter"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

// Row is a row that has a person's name, or that belongs to one.
type Row struct {
	// Table is the row's table, such as "ledger".
	Table string `json:"table"`

	// Row has the row's columns, without hashes and keys of locks.
	Row stdjson.RawMessage `json:"row"`
}

// Export yields every row that has subject as a word, and every line, transition and spend of such
// a hold or lease, table by table. In a REPEATABLE READ transaction all are of one moment. It reads
// all tables, without a lock, and needs the schema's owner, who may read tokens.
//
// The rows also have what others wrote about the person, and what they did in scopes of others:
// read them before you hand them out.
func (r *Register) Export(ctx context.Context, db querier, subject string) iter.Seq2[Row, error] {
	return func(yield func(Row, error) bool) {
		err := cmp.Or(r.made(), fault.NotNil(errArgument, "db", db))
		var p person
		if err == nil {
			p, err = find(subject)
		}
		var further []table
		if err == nil {
			further, err = r.further(ctx, db)
		}
		for _, t := range append(tables, further...) {
			if err != nil {
				break
			}
			row := Row{Table: strings.TrimPrefix(t.name, "metered.")}
			rows, _ := answer.Query(ctx, db, r.name.SQL(exportSQL(t)), p.subject, p.plain, p.escaped)
			_, err = pgx.ForEachRow(rows, []any{&row.Row}, func() error {
				one := Row{row.Table, append(stdjson.RawMessage(nil), row.Row...)}
				if !yield(one, nil) {
					return errStopped
				}
				return nil
			})
			if err == errStopped {
				return
			}
		}
		if err != nil {
			yield(Row{}, fault.Failed("privacy", "export", err))
		}
	}
}

var errStopped = fmt.Errorf("the loop has ended")

// exportSQL selects the rows of a table that are a person's.
func exportSQL(t table) string {
	where := anyOf(t.all(), column.has)
	if t.also != "" {
		for _, of := range tables {
			if strings.Contains(t.also, of.name+" y") {
				where += "\n    or " + fmt.Sprintf(t.also,
					strings.ReplaceAll(anyOf(of.all(), column.has), "x.", "y."))
			}
		}
	}
	hidden, extra := "fingerprint,digest,keys,fence,class", ""
	if t.name == "metered.hold_lines" || t.name == "metered.parked_scopes" {
		hidden += ",key"
	}
	if t.name == "metered.operations" {
		extra = " || pg_catalog.jsonb_build_object('result', pg_catalog.convert_from(x.result, 'UTF8'))"
	}
	return fmt.Sprintf(`select (pg_catalog.to_jsonb(x) - pg_catalog.string_to_array('%s', ','))%s from %s x
where $2::text is not null and $3::text is not null and (%s)`, hidden, extra, t.name, where)
}
