package holds

import (
	"slices"

	"github.com/pgmetered/metered/internal/ledger"
)

// checkUpTo refuses lines of which not each can have as much as the others.
func checkUpTo(lines []Line) error {
	for i, l := range lines {
		if l.Amount != lines[0].Amount {
			return invalid(index("Placement.Lines", i, ".Amount"),
				"%d is not that of the first line, %d: UpTo needs the same for all", l.Amount,
				lines[0].Amount)
		}
		if slices.ContainsFunc(lines[:i], func(before Line) bool { return before.Scope == l.Scope }) {
			return invalid(index("Placement.Lines", i, ".Scope"),
				"%q has a line already: UpTo needs one for each scope", l.Scope)
		}
	}
	return nil
}

// fewest are the units that each line must have, 0 without UpTo.
func (r *Placement) fewest() (units int64) {
	if !r.UpTo {
		return 0
	}
	for _, l := range r.Lines {
		units = max(1, units, l.AtLeast)
	}
	return units
}

// fewest are charges that hold no more than the fewest units, if these are not 0.
func fewest(charges []ledger.Charge, units int64) []ledger.Charge {
	if units == 0 {
		return charges
	}
	charges = slices.Clone(charges)
	for i, c := range charges {
		if c.Held > 0 {
			charges[i].Amount, charges[i].Held = c.Amount-c.Held+units, units
		}
	}
	return charges
}
