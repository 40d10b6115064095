package budget

import (
	"fmt"
	"strconv"
	"strings"
)

// Every is n units as one, for Per: a quarter is Every(3, Month), "3 months". Equal lengths are ==:
// Every(12, Month) is Year. Per then needs an anchor, unless the unit divides the year into equal
// parts.
func Every(n int, u Unit) Unit {
	months, days := u.lasts()
	switch {
	case n < 1 || n > maxDays || months+days == 0:
		return Unit(fmt.Sprintf("%d %ss", n, u)) // a limit with it is refused
	case months > 0:
		return unitOf(n*months, 0)
	}
	return unitOf(0, n*days)
}

// The greatest lengths of a period: about a century.
const (
	maxMonths = 1200
	maxDays   = 36525
)

// units are those of the calendar, which a period can have, with their lengths. A larger one comes
// first.
var units = []struct {
	Unit
	months, days int
}{{Year, 12, 0}, {Month, 1, 0}, {Week, 0, 7}, {Day, 0, 1}}

// unitOf is the unit of so many months or days.
func unitOf(months, days int) Unit {
	for _, u := range units {
		n := 0
		switch {
		case u.months > 0 && months%u.months == 0:
			n = months / u.months
		case u.days > 0 && days%u.days == 0:
			n = days / u.days
		}
		switch {
		case n == 1:
			return u.Unit
		case n > 1:
			return Unit(strconv.Itoa(n) + " " + string(u.Unit) + "s")
		}
	}
	return ""
}

// lasts is how many months or days a unit of the calendar has. Both are 0 for another unit, such as
// "12 months", which is a year.
func (u Unit) lasts() (months, days int) {
	for _, of := range units {
		if u == of.Unit {
			return of.months, of.days
		}
	}
	count, name, _ := strings.Cut(string(u), " ")
	n, err := strconv.Atoi(count)
	if err != nil || n < 2 || n > maxDays {
		return 0, 0
	}
	for _, of := range units {
		if months, days = n*of.months, n*of.days; name == string(of.Unit)+"s" &&
			months <= maxMonths && days <= maxDays && unitOf(months, days) == u {
			return months, days
		}
	}
	return 0, 0
}

func (u Unit) ofCalendar() bool {
	months, days := u.lasts()
	return months+days > 0
}

// fits reports whether the calendar says where the unit begins.
func (u Unit) fits() bool {
	months, days := u.lasts()
	return months > 0 && 12%months == 0 || days == 1 || days == 7
}

// sent is the unit as an interval of Postgres.
func (u Unit) sent() string {
	switch u { // without a look at its text
	case Day:
		return "P1D"
	case Week:
		return "P7D"
	case Month:
		return "P1M"
	case Year:
		return "P1Y"
	}
	months, days := u.lasts()
	if months > 0 {
		return "P" + strconv.Itoa(months) + "M"
	}
	return "P" + strconv.Itoa(days) + "D"
}
