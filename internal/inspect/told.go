package inspect

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// Told is a threshold that was reached and reported, and is not armed again yet.
type Told struct {
	Name  string    `json:"name"`            // of the limit, or else its kind, and of the threshold: as "plan/80 %"
	Of    string    `json:"of"`              // "period", "window" or "lifetime"
	Spent bool      `json:"spent,omitempty"` // of spending alone, without held units
	Until time.Time `json:"until,omitzero"`  // of a period: its end, which arms it. Else zero
	Rearm *int64    `json:"rearm,omitempty"` // of a lifetime: the usage that arms it again
}

// toldOf reads the reported thresholds of a scope's last entry (ledger.crossed). Its keys are the
// kind of limit, in upper case for a threshold on spending alone, its name and the threshold's
// name, with slashes between.
func toldOf(crossed []byte, now time.Time) ([]Told, error) {
	if len(crossed) == 0 {
		return nil, nil
	}
	var all map[string]struct {
		Until *string
		Net   *int64
		Rearm *int64
	}
	if err := json.Unmarshal(crossed, &all); err != nil {
		return nil, failed("read the reported thresholds", err)
	}
	var told []Told
	for key, v := range all {
		kind, name, _ := strings.Cut(key, "/")
		t := Told{Name: name, Of: map[string]string{"p": "period", "w": "window", "l": "lifetime"}[strings.ToLower(kind)], Spent: kind != strings.ToLower(kind), Rearm: v.Rearm}
		if v.Net == nil && v.Until != nil {
			until, err := time.Parse(time.RFC3339Nano, *v.Until)
			if err != nil {
				return nil, failed("read the reported thresholds", err)
			}
			if !until.After(now) {
				continue // the period is over
			}
			t.Until = until.UTC()
		}
		told = append(told, t)
	}
	slices.SortFunc(told, func(a, b Told) int { return cmp.Compare(a.Name, b.Name) })
	return told, nil
}
