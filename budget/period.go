package budget

import (
	"encoding/json"
	"fmt"
	"regexp"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Period divides time into periods without gaps. Period{Unit: Month, Zone: "Europe/Berlin"} is the
// calendar's month, and Per and PerPeriod make limits with one. Periods reach back before the
// anchor, and a period contains its first moment. Equal periods are ==, and the zero value is none.
type Period struct {
	// Unit is Day, Week, Month, Year or an Every of one of these, in Zone. It is "" for a Length.
	Unit Unit

	// Length is the length of each period, in whole microseconds, up to 36,525 days.
	Length time.Duration `json:"-"`

	// Zone is the IANA name of the time zone of Unit.
	Zone string

	// Anchor is the beginning of one period, in UTC and whole microseconds. A Length requires it.
	Anchor time.Time
}

// Per admits max units in each day, week, month, year or Every of these in a location, from the
// anchor's time of day, weekday or date on, by default midnight, Monday, the 1st, or the 1st of
// January. The server must know the location's name, or calls fail with the code budget_time_zone.
// They refuse time.Local, unless TZ names it. nil is UTC.
func Per(max int64, unit Unit, location *time.Location, anchor time.Time) Limit {
	return Limit{Max: max, Period: Period{Unit: unit, Zone: location.String(), Anchor: anchored(anchor)}}
}

// PerPeriod admits max units in each period of a length, from the anchor on.
func PerPeriod(max int64, length time.Duration, anchor time.Time) Limit {
	return Limit{Max: max, Period: Period{Length: length, Anchor: anchored(anchor)}}
}

// anchored is an anchor as it is compared.
func anchored(at time.Time) time.Time {
	if at.IsZero() {
		return time.Time{}
	}
	return at.UTC().Truncate(time.Microsecond)
}

// IsZero reports whether the Period is the zero value, which is no period.
func (p Period) IsZero() bool { return p == Period{} }

// word describes the period, for people.
func (p Period) word() string {
	if p.Unit == "" {
		return p.Length.String()
	}
	return fmt.Sprintf("%s (%s)", p.Unit, p.Zone)
}

// namedZone is the names that are no POSIX rules, which Postgres would take as well, with their
// signs the other way round.
var namedZone = regexp.MustCompile(`^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$`)

func (p Period) check(field string) error {
	switch {
	case p.Anchor.Location() != time.UTC || p.Anchor != anchored(p.Anchor):
		return invalid(field+".Anchor", "%v is not in UTC and whole microseconds: budget.Per and budget.PerPeriod make it so", p.Anchor)
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
	case !p.Unit.ofCalendar():
		return invalid(field+".Unit", "%q is not one of day, week, month, year, and no budget.Every of them", p.Unit)
	case p.Anchor.IsZero() && !p.Unit.fits():
		return invalid(field+".Anchor", "is missing: periods of %s are counted from it", p.Unit)
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
	return ledger.Period{Every: p.Unit.sent(), Anchor: p.Anchor, Zone: p.Zone}
}

func (p Period) MarshalJSON() ([]byte, error) { return json.Marshal(p.json()) }

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
	if j.PeriodUS < 0 || j.PeriodUS > bounds.MaxWindow.Microseconds() {
		return Period{}, invalid("period_us", "%d is not from 1 to %d", j.PeriodUS,
			bounds.MaxWindow.Microseconds())
	}
	p := Period{Unit: j.Unit, Length: time.Duration(j.PeriodUS) * time.Microsecond, Zone: j.Zone,
		Anchor: anchored(j.Anchor)}
	if p.IsZero() {
		return p, nil
	}
	return p, p.check("period")
}
