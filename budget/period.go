package budget

import (
	"encoding/json"
	"fmt"
	"regexp"
	"time"

	"github.com/pgmetered/metered/internal/ledger"
)

// Unit is a period of the calendar.
type Unit string

// The units. A day has 23 to 25 hours where clocks change.
const (
	Day   Unit = "day"
	Week  Unit = "week"
	Month Unit = "month"
	Year  Unit = "year"
)

// every is the length of one period, as an interval of Postgres.
var every = map[Unit]string{Day: "P1D", Week: "P7D", Month: "P1M", Year: "P1Y"}

// Period is the calendar or length by which a limit by period counts. PerDay, PerWeek, PerMonth, PerYear and PerPeriod make one. Two are the
// same period if they are ==. The zero value is none.
//
// Periods follow each other without a gap, before the anchor too, and each begins where the one before ends: its first
// moment belongs to it, and its last one does not. The database decides which one is now, by its clock and its time zone data.
type Period struct {
	Unit   Unit          // of the calendar in Zone, "" for a fixed Length
	Length time.Duration `json:"-"` // of a period without a Unit, in microseconds up to MaxWindow. In JSON "period_us"
	Zone   string        // the IANA name of the time zone, as the server knows it. Only with a Unit
	// Anchor is where one of the periods begins, in UTC and whole microseconds. Without one, a Unit begins at midnight, on
	// Monday, on the 1st, or on the 1st of January. A Length needs one.
	Anchor time.Time
}

// PerDay is a limit of max units in each day in a location. A day begins when clocks there first show the time of day that
// they show at the anchor, and without one (the zero time) at midnight. Where clocks are set forward past that, it begins as
// much later.
//
// The location goes to the server by its name, such as "America/New_York": time.LoadLocation makes one. time.Local, which
// has no name, and others that are not of the form Area/City or UTC are refused by each call, and a name that the server does not
// know is ErrTimeZone.
func PerDay(max int64, location *time.Location, anchor time.Time) Limit {
	return perUnit(max, Day, location, anchor)
}

// PerWeek is PerDay for weeks: from the anchor's day of the week and time of day on, or from Monday.
func PerWeek(max int64, location *time.Location, anchor time.Time) Limit {
	return perUnit(max, Week, location, anchor)
}

// PerMonth is PerDay for months: from the anchor's day and time of day on, or from the 1st. An anchor on the 31st begins
// shorter months on their last day, and longer ones on the 31st again.
func PerMonth(max int64, location *time.Location, anchor time.Time) Limit {
	return perUnit(max, Month, location, anchor)
}

// PerYear is PerDay for years: from the anchor's day of the year on, or from the 1st of January. An anchor on the 29th of
// February begins other years on the 28th.
func PerYear(max int64, location *time.Location, anchor time.Time) Limit {
	return perUnit(max, Year, location, anchor)
}

// PerPeriod is a limit of max units in each period of a fixed length, counted from the anchor: a subscription's 30 days.
func PerPeriod(max int64, length time.Duration, anchor time.Time) Limit {
	return Limit{Max: max, Period: Period{Length: length, Anchor: anchored(anchor)}}
}

func perUnit(max int64, unit Unit, location *time.Location, anchor time.Time) Limit {
	return Limit{Max: max, Period: Period{Unit: unit, Zone: location.String(), Anchor: anchored(anchor)}}
}

// anchored is an anchor as it is compared.
func anchored(at time.Time) time.Time {
	if at.IsZero() {
		return time.Time{}
	}
	return at.UTC().Truncate(time.Microsecond)
}

// IsZero reports whether it is no period.
func (p Period) IsZero() bool { return p == Period{} }

// String describes the period, for people.
func (p Period) String() string {
	if p.Unit == "" {
		return p.Length.String()
	}
	return fmt.Sprintf("%s (%s)", p.Unit, p.Zone)
}

// namedZone is the names that are no POSIX rules, which Postgres would take as well, with their signs the other way round.
var namedZone = regexp.MustCompile(`^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$`)

func (p Period) check(field string) error {
	switch {
	case p.Anchor.Location() != time.UTC || p.Anchor != anchored(p.Anchor):
		return invalid(field+".Anchor", "%v is not in UTC and whole microseconds: budget.PerMonth and the like make it so", p.Anchor)
	case !p.Anchor.IsZero() && (p.Anchor.Year() < 1 || p.Anchor.Year() > 9999):
		return invalid(field+".Anchor", "the year %d is not from 1 to 9999", p.Anchor.Year())
	case p.Unit == "" && p.Zone != "":
		return invalid(field+".Zone", "is for a Unit of the calendar: a Length has none")
	case p.Unit == "" && p.Anchor.IsZero():
		return invalid(field+".Anchor", "is missing: periods of a Length are counted from it")
	case p.Unit == "" && p.Length == 0:
		return invalid(field+".Length", "is missing")
	case p.Unit == "":
		return checkWindow(field+".Length", p.Length)
	case p.Length != 0:
		return invalid(field+".Length", "and a Unit exclude each other")
	case every[p.Unit] == "":
		return invalid(field+".Unit", "%q is not one of day, week, month, year", p.Unit)
	case p.Zone == "Local":
		return invalid(field+".Zone", "is that of time.Local, which has no name: use time.LoadLocation")
	case len(p.Zone) > 64 || !namedZone.MatchString(p.Zone):
		return invalid(field+".Zone", "%q is not UTC, nor a name like Europe/Berlin", p.Zone)
	}
	return nil
}

// sent is the period as it is sent.
func (p Period) sent() ledger.Period {
	switch {
	case p.IsZero():
		return ledger.Period{}
	case p.Unit == "":
		return ledger.Period{Every: ledger.Every(p.Length), Anchor: p.Anchor}
	}
	return ledger.Period{Every: every[p.Unit], Anchor: p.Anchor, Zone: p.Zone}
}

// MarshalJSON writes it as a Limit does.
func (p Period) MarshalJSON() ([]byte, error) { return json.Marshal(p.json()) }

// UnmarshalJSON reads the output of MarshalJSON.
func (p *Period) UnmarshalJSON(text []byte) (err error) {
	var in periodJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	*p, err = in.period()
	return err
}

// periodJSON is a Period as JSON, also among the members of others.
type periodJSON struct {
	Unit     Unit      `json:"period,omitempty"`
	PeriodUS int64     `json:"period_us,omitempty"`
	Zone     string    `json:"time_zone,omitempty"`
	Anchor   time.Time `json:"anchor,omitzero"`
}

func (p Period) json() periodJSON {
	return periodJSON{p.Unit, p.Length.Microseconds(), p.Zone, p.Anchor}
}

// period is the JSON's period, which may be none.
func (j periodJSON) period() (Period, error) {
	if j.PeriodUS < 0 || j.PeriodUS > MaxWindow.Microseconds() {
		return Period{}, invalid("period_us", "%d is not from 1 to %d", j.PeriodUS, MaxWindow.Microseconds())
	}
	p := Period{Unit: j.Unit, Length: time.Duration(j.PeriodUS) * time.Microsecond, Zone: j.Zone, Anchor: anchored(j.Anchor)}
	if p.IsZero() {
		return p, nil
	}
	return p, p.check("period")
}
