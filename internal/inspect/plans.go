package inspect

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/budget"
)

// PlanState says what a plan does next.
type PlanState string

// States of plans.
const (
	PlanBegins PlanState = "begins" // its first period is still to come
	PlanRenews PlanState = "renews" // another period follows
	PlanEnds   PlanState = "ends"   // it was cancelled or changed, and has units left
)

// Plan is a plan of a wallet: a grant that renews.
type Plan struct {
	Plan     string        `json:"plan"` // the reference of the grant
	Wallet   string        `json:"wallet"`
	State    PlanState     `json:"state"`
	At       time.Time     `json:"at,omitzero"`     // when it does what State says; zero if this program lacks the time zone
	Period   budget.Period `json:"period,omitzero"` // zero for one that ends
	Amount   int64         `json:"amount,omitempty"`
	Category string        `json:"category,omitempty"`
	Units    int64         `json:"units"` // of the wallet, which can be drawn
}

// PlanNames says which plans are meant: * for all, pro* for those that begin with pro, and any
// other text for the plan of that name.
type PlanNames string

func (p PlanNames) args() (beginning string, whole bool) {
	beginning, some := strings.CutSuffix(string(p), "*")
	return beginning, !some
}

// byPlan orders plans by name, and those of one name by what is left, the fewest units first.
func byPlan(a, b Plan) int {
	return cmp.Or(cmp.Compare(a.Plan, b.Plan), cmp.Compare(a.Units, b.Units), cmp.Compare(a.Wallet, b.Wallet), cmp.Compare(a.State, b.State))
}

// plansOf are the plans of the wallet w.scope at c.now. Those that go on have a lot that begins
// later, and those that end a present one. Each part reads a partial index.
const plansOf = `lateral (
    select (l.plan).renewal as plan, l.category, (l.plan).renew_amount as amount,
        case when l.reference = (l.plan).renewal and l.starts_at > c.now then 'begins' else 'renews' end as state, l.starts_at as at,
        ((l.plan).renews).every, ((l.plan).renews).anchor, ((l.plan).renews).zone
    from metered.lot_rows l where l.scope = w.scope and l.pending > 0 and ((l.plan).renews).every is not null
    union all
    select (l.plan).renewal, l.category, 0, 'ends', l.expires_at, null, null, null
    from ((select l.category, l.expires_at, l.plan, l.origin from metered.lot_rows l where l.scope = w.scope and l.open order by l.expires_at, l.age)
          union all
          (select l.category, l.expires_at, l.plan, l.origin from metered.lot_rows l where l.scope = w.scope and l.keeps order by l.expires_at, l.age)) l
    where l.expires_at > c.now and (l.plan).renewal is not null and l.origin = 'g'
      and not exists (select from metered.lot_rows n where n.scope = w.scope and n.pending > 0
                      and ((n.plan).renews).every is not null and (n.plan).renewal = (l.plan).renewal)) p`

// named are plans of the name $6, or if $7 is false, of names that begin with it.
const named = `case when $7 then p.plan = $6 else pg_catalog.starts_with(p.plan, $6) end`

const plansSQL = `
select w.scope, p.plan, p.category, p.amount, p.state, p.at, p.every, coalesce(p.anchor, '-infinity'), coalesce(p.zone, ''), c.now
from (select metered.clock() as now offset 0) c, pg_catalog.unnest($1::text[]) w(scope), ` + plansOf + `
where case when $3 then p.plan = $2 else pg_catalog.starts_with(p.plan, $2) end`

// Plans returns the plans of wallets, by plan. A plan that has ended and of whose last units none
// is left is not among them.
func (r *Reader) Plans(ctx context.Context, wallets []string, names PlanNames) ([]Plan, error) {
	if len(wallets) == 0 {
		return nil, nil
	}
	beginning, whole := names.args()
	plans, err := collect(ctx, r, plansSQL, scanPlan, wallets, beginning, whole)
	if err != nil {
		return nil, failed("plans", err)
	}
	units, err := r.Rooms(ctx, wallets, Credit)
	if err != nil {
		return nil, err
	}
	left := map[string]int64{}
	for _, room := range units {
		left[room.Scope] = room.Rest()
	}
	for i := range plans {
		plans[i].Units = left[plans[i].Wallet]
	}
	slices.SortFunc(plans, byPlan)
	return plans, nil
}

func scanPlan(row pgx.CollectableRow) (p Plan, err error) {
	var every pgtype.Interval
	var anchor pgtype.Timestamptz
	var now time.Time
	if err := row.Scan(&p.Wallet, &p.Plan, &p.Category, &p.Amount, &p.State, &p.At, &every, &anchor, &p.Period.Zone, &now); err != nil {
		return p, err
	}
	switch {
	case every.Months > 0:
		p.Period.Unit = budget.Every(int(every.Months), budget.Month)
	case every.Days > 0:
		p.Period.Unit = budget.Every(int(every.Days), budget.Day)
	default:
		p.Period.Length = time.Duration(every.Microseconds) * time.Microsecond
	}
	if anchor.InfinityModifier == pgtype.Finite {
		p.Period.Anchor = anchor.Time.UTC()
	}
	// Nobody has written to the wallet since: the present period ends later.
	if p.At = p.At.UTC(); !p.At.After(now) {
		if _, p.At, err = p.Period.At(now); err != nil {
			p.At = time.Time{}
		}
	}
	return p, nil
}
