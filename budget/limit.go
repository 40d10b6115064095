package budget

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"time"
	"unique"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Limit bounds the units of a scope. PerWindow, Per, PerPeriod, Lifetime and Prepaid make one, with
// exactly one of Window, Period, Lifetime and Prepaid. Equal limits are ==.
//
// In JSON it is {"name":"burst","max":9,"window_us":60000000}, {"max":9,"lifetime":true},
// {"max":9,"prepaid":true}, or {"max":9,"period":"month","time_zone":"Europe/Berlin"} with its
// "anchor".
type Limit struct {
	// Max is the most units that may count, from 0 to 2^62.
	Max int64

	// Window is the age up to which charges count, in whole microseconds, up to 36,525 days.
	Window time.Duration

	// Period makes the charges of the present period count.
	Period Period

	// Lifetime makes all charges count, less credits.
	Lifetime bool

	// Prepaid counts as Lifetime does. A refusal asks for more credit.
	Prepaid bool

	// Observe makes a limit that never refuses, to try it: Standing.Over says when it would have,
	// and Standing.Unknown that the limit reaches purged entries. It does not go with Prepaid.
	// Charges with such a limit are made in the ledger and not from a lease.
	Observe bool

	// Name is shown in refusals, standings and metrics.
	Name string

	query      *query                       // reads Max from the database, nil if Max is set
	thresholds unique.Handle[thresholdList] // of WithThresholds, zero for none
}

type query struct {
	sql  string
	args []any
}

// PerWindow admits max units in each window, which slides: a charge counts while it is younger than
// the window. The window is in whole microseconds, up to 36,525 days.
func PerWindow(max int64, window time.Duration) Limit { return Limit{Max: max, Window: window} }

// Lifetime admits max units in all. Credits raise it.
func Lifetime(max int64) Limit { return Limit{Max: max, Lifetime: true} }

// Prepaid admits credited units, and up to overdraft more. Over HTTP its refusal is a 402.
func Prepaid(overdraft int64) Limit { return Limit{Max: overdraft, Prepaid: true} }

// Reach is the age up to which entries count: the window, or the longest period and a day, or 0 for
// a lifetime.
func (l Limit) Reach() time.Duration {
	const day = 24 * time.Hour
	months, days := l.Period.Unit.lasts()
	if months+days == 0 {
		return max(l.Window, l.Period.Length, 0)
	}
	return time.Duration(days+months/12*366+months%12*31+1) * day
}

// Named returns the limit with a name, which refusals, standings and metrics show.
func (l Limit) Named(name string) Limit {
	l.Name = name
	return l
}

// MaxFrom returns the limit with the Max that a query answers: one row of one integer from 0 to
// 2^62. Else the charge fails with the code limit_query. A call asks its queries under the scopes'
// locks. Above READ COMMITTED the query must lock its rows (FOR SHARE). metered.Open and Do ask a
// query that locks none before they have the scopes, too, so that callers of a busy one need not
// wait for its answer: FOR SHARE is not needed there. Not for Capture, ChargeNow and batches.
func (l Limit) MaxFrom(sql string, args ...any) Limit {
	l.Max, l.query = 0, &query{sql, slices.Clone(args)}
	return l
}

func (l Limit) check(field string) error {
	switch {
	case l.query != nil && strings.TrimSpace(l.query.sql) == "":
		return invalid(field+".MaxFrom", "is an empty query")
	case l.Max < 0 || l.Max > bounds.MaxLimit:
		return invalid(field+".Max", "%d is not from 0 to %d", l.Max, int64(bounds.MaxLimit))
	}
	if l.tells() {
		if err := l.sentThresholds().err; err != nil {
			return within(field, err)
		}
	}
	switch kinds := l.kinds(); {
	case l.Observe && l.Prepaid:
		return invalid(field+".Observe", "is not for Prepaid: it would give credit that nobody bought")
	case kinds > 1:
		return invalid(field+".Window", "Period, Lifetime and Prepaid exclude each other")
	case !l.Period.IsZero():
		return l.Period.check(field + ".Period")
	case kinds == 0:
		return invalid(field+".Window", "is missing: write budget.PerWindow(%d, window), or budget.Lifetime(%d) "+
			"for a limit over the scope's lifetime", l.Max, l.Max)
	case l.Lifetime || l.Prepaid:
		return nil
	}
	return checkWindow(field+".Window", l.Window)
}

// kinds is how many of Window, Period, Lifetime and Prepaid are set.
func (l Limit) kinds() (n int) {
	for _, set := range []bool{l.Window != 0, !l.Period.IsZero(), l.Lifetime, l.Prepaid} {
		if set {
			n++
		}
	}
	return n
}

// sentWith is the limit with another Max, as it is sent.
func (l Limit) sentWith(most int64) ledger.Limit {
	l.Max = most
	return l.sent()
}

// sent is the limit as it is sent.
func (l Limit) sent() ledger.Limit {
	sent := ledger.Limit{Max: l.Max, Window: l.Window, Period: l.Period.sent()}
	if l.Observe {
		sent.Max = math.MaxInt64 // beyond all others: it refuses nothing, also where its use is unknown
	}
	if l.tells() {
		of := l.sentThresholds()
		sent.Thresholds, sent.TellAt, sent.Spent = of.text, of.tellAt, of.spent
	}
	return sent
}

// limitJSON is a Limit as JSON. A lifetime is said, and not left to a missing window.
type limitJSON struct {
	Name     string `json:"name,omitempty"`
	Max      int64  `json:"max"`
	WindowUS int64  `json:"window_us,omitempty"`
	Lifetime bool   `json:"lifetime,omitempty"`
	Prepaid  bool   `json:"prepaid,omitempty"`
	Observe  bool   `json:"observe,omitempty"`
	periodJSON
	Thresholds []Threshold `json:"thresholds,omitempty"`
}

func (l Limit) MarshalJSON() ([]byte, error) {
	return json.Marshal(limitJSON{
		Name: l.Name, Max: l.Max, WindowUS: l.Window.Microseconds(), Lifetime: l.Lifetime,
		Prepaid: l.Prepaid, Observe: l.Observe,
		periodJSON: l.Period.json(), Thresholds: l.Thresholds(),
	})
}

func (l *Limit) UnmarshalJSON(text []byte) error {
	var in limitJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	if in.WindowUS < 0 || in.WindowUS > bounds.MaxWindow.Microseconds() {
		return invalid("window_us", "%d is not from 1 to %d", in.WindowUS, bounds.MaxWindow.Microseconds())
	}
	period, err := in.period()
	if err != nil {
		return err
	}
	*l = Limit{
		Name: in.Name, Max: in.Max, Window: time.Duration(in.WindowUS) * time.Microsecond, Period: period,
		Lifetime: in.Lifetime, Prepaid: in.Prepaid, Observe: in.Observe,
	}
	if l.kinds() > 1 {
		return invalid("window_us", "period, lifetime and prepaid exclude each other")
	}
	if len(in.Thresholds) > bounds.MaxThresholds {
		return invalid("thresholds", "are %d, want at most %d", len(in.Thresholds), bounds.MaxThresholds)
	}
	*l = l.WithThresholds(in.Thresholds...)
	return nil
}
