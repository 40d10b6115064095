package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// vacuumWatch looks five times a second at what autovacuum does.
type vacuumWatch struct {
	pool    *pgxpool.Pool
	began   time.Time
	before  map[string]int64 // sizes by table
	samples int
	busy    int
	tables  map[string]int     // samples in which a table was worked on
	cpu     map[string]float64 // nanoseconds of each worker, as last seen
	withCPU bool
}

func watchVacuum(ctx context.Context, s *site) (*vacuumWatch, error) {
	cfg := s.Config().Copy()
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	v := &vacuumWatch{pool: pool, began: time.Now(), tables: map[string]int{}, cpu: map[string]float64{}}
	var ns *float64
	v.withCPU = pool.QueryRow(ctx, `select split_part(pg_read_file('/proc/' || pg_backend_pid() || '/schedstat', 0, 200, true), ' ', 1)::float8`).
		Scan(&ns) == nil
	v.before, err = v.sizes(ctx)
	return v, err
}

// The CPU of a worker of another database counts too, since it takes it from ours.
const vacuumSQL = `
select a.pid || ' ' || a.backend_start, coalesce(a.datname = current_database(), false), a.query,
    case when $1 then split_part(pg_read_file('/proc/' || a.pid || '/schedstat', 0, 200, true), ' ', 1)::float8 end
from pg_stat_activity a where a.backend_type = 'autovacuum worker'`

func (v *vacuumWatch) sample(ctx context.Context) error {
	rows, err := v.pool.Query(ctx, vacuumSQL, v.withCPU)
	if err != nil {
		return err
	}
	var worker, query string
	var ours bool
	var ns *float64
	working := false
	_, err = pgx.ForEachRow(rows, []any{&worker, &ours, &query, &ns}, func() error {
		working = true
		if ns != nil {
			v.cpu[worker] = *ns
		}
		if ours && query != "" {
			v.tables[strings.TrimPrefix(query, "autovacuum: ")]++
		}
		return nil
	})
	v.samples++
	if working {
		v.busy++
	}
	return err
}

const sizesSQL = `
select relid::regclass::text, pg_total_relation_size(relid) from pg_stat_user_tables`

func (v *vacuumWatch) sizes(ctx context.Context) (map[string]int64, error) {
	rows, err := v.pool.Query(ctx, sizesSQL)
	if err != nil {
		return nil, err
	}
	sizes := map[string]int64{}
	var table string
	var bytes int64
	_, err = pgx.ForEachRow(rows, []any{&table, &bytes}, func() error {
		sizes[table] = bytes
		return nil
	})
	return sizes, err
}

const tablesSQL = `
select relid::regclass::text, n_live_tup, n_dead_tup, n_tup_ins, n_tup_upd, n_tup_del, autovacuum_count, pg_total_relation_size(relid)
from pg_stat_user_tables where n_tup_ins + n_tup_upd + n_tup_del > 0 order by 8 desc`

// report ends the soak with what is left of it.
func (s *soaking) report(ctx context.Context, v *vacuumWatch, w io.Writer) error {
	defer v.pool.Close()
	report, err := s.client.Budget.Verify(ctx, s.Pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	if !report.OK() {
		return errors.New("the ledger does not verify: " + fmt.Sprint(report.Differences[0]))
	}
	seconds := time.Since(v.began).Seconds()
	fmt.Fprintf(w, "\n%d commands in %.0f s (%.0f/s), %d refused, %d refunds; the ledger verifies\n",
		s.done, seconds, float64(s.done)/seconds, s.denied, s.refunds)
	fmt.Fprintf(w, "autovacuum: a worker was there in %.1f %% of %d samples", 100*float64(v.busy)/float64(max(v.samples, 1)), v.samples)
	if v.withCPU {
		total := 0.0
		for _, ns := range v.cpu {
			total += ns
		}
		fmt.Fprintf(w, ", and used %.2f %% of one core", total/1e7/seconds)
	}
	fmt.Fprintln(w)
	for _, what := range slices.SortedFunc(maps.Keys(v.tables), func(a, b string) int { return v.tables[b] - v.tables[a] }) {
		fmt.Fprintf(w, "  %4.1f %% of the time: %s\n", 100*float64(v.tables[what])/float64(v.samples), what)
	}
	rows, err := s.Query(ctx, tablesSQL)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "table\tlive\tdead\tinserted\tupdated\tdeleted\tautovacuums\tKiB at first\tKiB now\t")
	var table string
	var live, dead, ins, upd, del, vacuums, size int64
	_, err = pgx.ForEachRow(rows, []any{&table, &live, &dead, &ins, &upd, &del, &vacuums, &size}, func() error {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", table, live, dead, ins, upd, del, vacuums, v.before[table]/1024, size/1024)
		return nil
	})
	t.Flush()
	return err
}
