package wallet

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Ends says when a lot ends. At, After, EachPeriod, EachPeriodProrated and EachPeriodWithFirst make
// one. Equal ends are ==, and the zero value is never.
type Ends struct {
	kind endKind
	at   time.Time
	last time.Duration
	each budget.Period

	// first is the units of the first lot, of EachPeriodWithFirst.
	first int64
}

// endKind is a constructor of Ends, as JSON has it.
type endKind string

const (
	endsAt       endKind = "at"
	endsAfter    endKind = "after"
	endsEach     endKind = "each_period"
	endsProrated endKind = "each_period_prorated"
	endsFirst    endKind = "each_period_with_first"
)

// At makes the lot end at a time before the year 9000. Nothing is drawn of it from then on.
func At(t time.Time) Ends { return Ends{kind: endsAt, at: t} }

// After makes the lot end a time after its beginning, up to 36,525 days.
func After(d time.Duration) Ends { return Ends{kind: endsAfter, last: d} }

// EachPeriod makes a plan: the lot ends with its period, and each period after that begins with a
// lot like it, whether anything runs then or not, until a Revoke of its Renewals. The period is a
// day long at least. The grant needs a Reference.
func EachPeriod(p budget.Period) Ends { return Ends{kind: endsEach, each: p} }

// EachPeriodProrated is EachPeriod with a first lot that has the part of Amount for the rest of its
// period: from Grant.Starts on, by time and rounded down, as budget.Period.Prorate has it. The part
// can be 0 units.
func EachPeriodProrated(p budget.Period) Ends { return Ends{kind: endsProrated, each: p} }

// EachPeriodWithFirst is EachPeriod with a first lot of a number of units, from 0 on, which the
// caller computes in another way.
func EachPeriodWithFirst(p budget.Period, units int64) Ends {
	return Ends{kind: endsFirst, each: p, first: units}
}

// never reports whether a lot has no end.
func (e Ends) never() bool { return e.kind == "" }

// renews reports whether a lot comes in each period.
func (e Ends) renews() bool { return !e.never() && e.kind != endsAt && e.kind != endsAfter }

// firstUnits is the units of the first lot, or nil for the amount of the grant or its part.
func (e Ends) firstUnits() *int64 {
	if e.kind != endsFirst {
		return nil
	}
	return &e.first
}

// prorated reports whether the first lot has a part of the amount.
func (e Ends) prorated() bool { return e.kind == endsProrated }

// check refuses an end that no lot can have.
func (e Ends) check(field string) error {
	switch e.kind {
	case endsAt:
		if e.at.IsZero() {
			return invalid(field, "is At the zero time: leave it out for a lot that never ends")
		}
		return checkYear(field, e.at)
	case endsAfter:
		return checkDuration(field, e.last)
	case "":
		return nil
	}
	if e.each.IsZero() {
		return invalid(field, "is of no period")
	}
	if tooShort(e.each) {
		return invalid(field, "%v is shorter than a day", e.each.Length)
	}
	if e.first < 0 || e.first > bounds.MaxAmount {
		return invalid(field, "a first lot of %d is not from 0 to %d", e.first, int64(bounds.MaxAmount))
	}
	return nil
}

func checkYear(field string, t time.Time) error {
	if t.Year() < 1 || t.UTC().Year() >= 9000 {
		return invalid(field, "is not before the year 9000")
	}
	return nil
}

// tooShort reports whether a period may be shorter than a day. A call writes all that came since
// the last one, so that nothing comes more often.
func tooShort(p budget.Period) bool { return p.Length != 0 && p.Length < day }

// Roll says how units go on in another lot when their lot ends.
type Roll struct {
	// Cap is the most units that roll over, from 1 to 2^53. The rest lapses.
	Cap int64

	// Lasts is how long the units that rolled over last. For and ToEndOf make one. It defaults to
	// for ever.
	Lasts Span

	// Times is how often units roll over, up to 10,000, or -1 for always. More than once is for a
	// Lasts of a day at least. It defaults to once.
	Times int

	// Shared makes Cap the most rolled-over units that all lots of the Category have together.
	Shared bool
}

// Span says how long units last that rolled over. For and ToEndOf make one. The zero value is for
// ever.
type Span struct {
	length time.Duration
	to     budget.Period
	kind   endKind
}

// For makes units that roll over last for a time, up to 36,525 days.
func For(d time.Duration) Span { return Span{kind: endsAfter, length: d} }

// ToEndOf makes units that roll over last until the end of the period in which they do.
func ToEndOf(p budget.Period) Span { return Span{kind: endsEach, to: p} }

// check refuses what cannot roll over so.
func (r Roll) check(field string) error {
	if err := checkAmount(field+".Cap", r.Cap); err != nil {
		return err
	}
	switch r.Lasts.kind {
	case endsAfter:
		if err := checkDuration(field+".Lasts", r.Lasts.length); err != nil {
			return err
		}
	case endsEach:
		if r.Lasts.to.IsZero() {
			return invalid(field+".Lasts", "is to the end of no period")
		}
	}
	if r.Times < -1 || r.Times > maxRolls {
		return invalid(field+".Times", "%d is not from 1 to %d, nor -1", r.Times, maxRolls)
	}
	brief := tooShort(r.Lasts.to) || r.Lasts.to.IsZero() && r.Lasts.length < day
	if brief && r.Times != 0 && r.Times != 1 {
		return invalid(field+".Times", "is for units that end again: write Lasts, of a day or more")
	}
	return nil
}

// plan is the part of a plan that rolls over.
func (r Roll) plan(p *ledger.Plan) (err error) {
	if p.RollTo, err = inBudget.Period("Grant.Roll.Lasts", r.Lasts.to); err != nil {
		return err
	}
	if p.RollShared = r.Shared; r.Times != 0 {
		p.RollAgain = max(r.Times-1, -1)
	}
	if r.Times < 0 {
		p.RollAgain = -1
	}
	return nil
}

// endJSON is an Ends or a Span as JSON.
type endJSON struct {
	Kind   endKind        `json:"kind,omitempty"`
	At     time.Time      `json:"at,omitzero"`
	For    time.Duration  `json:"for,omitempty"`
	Period *budget.Period `json:"period,omitempty"`
	First  *int64         `json:"first,omitempty"`
}

func periodOrNone(p budget.Period) *budget.Period {
	if p.IsZero() {
		return nil
	}
	return &p
}

func (j endJSON) period() (p budget.Period) {
	if j.Period != nil {
		p = *j.Period
	}
	return p
}

// MarshalJSON writes an object, {} for never.
func (e Ends) MarshalJSON() ([]byte, error) {
	return json.Marshal(endJSON{e.kind, e.at, e.last, periodOrNone(e.each), e.firstUnits()})
}

// UnmarshalJSON reads what MarshalJSON writes. It fails for any other kind of end.
func (e *Ends) UnmarshalJSON(text []byte) error {
	var in endJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	read := Ends{}
	switch in.Kind {
	case "":
	case endsAt:
		read = At(in.At)
	case endsAfter:
		read = After(in.For)
	case endsEach:
		read = EachPeriod(in.period())
	case endsProrated:
		read = EachPeriodProrated(in.period())
	case endsFirst:
		if in.First == nil {
			return fmt.Errorf("wallet: an end of the kind %q has no first", in.Kind)
		}
		read = EachPeriodWithFirst(in.period(), *in.First)
	default:
		return fmt.Errorf("wallet: an end has the kind %q, which this build does not know", in.Kind)
	}
	*e = read
	return nil
}

// MarshalJSON writes an object, {} for ever.
func (s Span) MarshalJSON() ([]byte, error) {
	return json.Marshal(endJSON{Kind: s.kind, For: s.length, Period: periodOrNone(s.to)})
}

// UnmarshalJSON reads what MarshalJSON writes. It fails for any other kind of span.
func (s *Span) UnmarshalJSON(text []byte) error {
	var in endJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	switch in.Kind {
	case "":
		*s = Span{}
	case endsAfter:
		*s = For(in.For)
	case endsEach:
		*s = ToEndOf(in.period())
	default:
		return fmt.Errorf("wallet: a span has the kind %q, which this build does not know", in.Kind)
	}
	return nil
}
