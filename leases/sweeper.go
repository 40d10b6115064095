package leases

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// Sweeper is a Pool that leases nothing, on the connections of db: for package maintain, which sweeps and purges. Nobody
// has to close it.
func (internals) Sweeper(l *budget.Ledger, db *pgxpool.Pool) (*Pool, error) {
	carver, err := NewCarver(l)
	if err != nil {
		return nil, err
	}
	p := &Pool{db: db, own: db, ledger: l, carver: carver, cfg: Config{Owner: carver.owner, NoRecall: true}, observer: inBudget.Observer(l)}
	p.schema, p.wait, _ = inBudget.Settings(l)
	p.sql = render(p.schema)
	p.live, p.stop = context.WithCancel(context.Background())
	p.last, p.end = p.live, p.stop
	return p, nil
}
