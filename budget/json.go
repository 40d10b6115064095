package budget

import (
	"encoding/json"
	"time"
)

// Durations are in microseconds as JSON, the ledger's own unit, and say so in their names.

func micros(d time.Duration) *int64 {
	us := d.Microseconds()
	return &us
}

func ofMicros(us *int64) time.Duration {
	if us == nil {
		return 0
	}
	return time.Duration(*us) * time.Microsecond
}

// dueMicros are there only if something is held: 0 says that a hold is due now.
func dueMicros(held int64, due time.Duration) *int64 {
	if held == 0 {
		return nil
	}
	return micros(due)
}

type plainRefusal Refusal

type refusalJSON struct {
	*plainRefusal
	RetryAfterUS *int64 `json:"retry_after_us"` // null: never
	HoldDueUS    *int64 `json:"hold_due_us,omitempty"`
}

func (r Refusal) MarshalJSON() ([]byte, error) {
	out := refusalJSON{plainRefusal: (*plainRefusal)(&r), HoldDueUS: dueMicros(r.Held, r.HoldDue)}
	if r.RetryAfter != Never {
		out.RetryAfterUS = micros(r.RetryAfter)
	}
	return json.Marshal(out)
}

func (r *Refusal) UnmarshalJSON(text []byte) error {
	in := refusalJSON{plainRefusal: (*plainRefusal)(r)}
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	r.RetryAfter, r.HoldDue = Never, ofMicros(in.HoldDueUS)
	if in.RetryAfterUS != nil {
		r.RetryAfter = ofMicros(in.RetryAfterUS)
	}
	return nil
}

type plainUsage Usage

type usageJSON struct {
	Scope    string `json:"scope"`
	WindowUS int64  `json:"window_us,omitempty"`
	Lifetime bool   `json:"lifetime,omitempty"`
	periodJSON
	*plainUsage
	HoldDueUS *int64 `json:"hold_due_us,omitempty"`
}

func (u Usage) MarshalJSON() ([]byte, error) {
	return json.Marshal(usageJSON{
		Scope: u.Scope, WindowUS: u.Window.Microseconds(), Lifetime: u.Window == 0 && u.Period.IsZero(),
		periodJSON: u.Period.json(),
		plainUsage: (*plainUsage)(&u), HoldDueUS: dueMicros(u.Held, u.HoldDue),
	})
}

func (u *Usage) UnmarshalJSON(text []byte) error {
	in := usageJSON{plainUsage: (*plainUsage)(u)}
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	period, err := in.period()
	if err != nil {
		return err
	}
	u.Query = Query{Scope: in.Scope, Window: time.Duration(in.WindowUS) * time.Microsecond, Period: period}
	u.HoldDue = ofMicros(in.HoldDueUS)
	return nil
}

type plainClockState ClockState

type clockStateJSON struct {
	*plainClockState
	AheadUS *int64 `json:"ahead_us"`
}

func (s ClockState) MarshalJSON() ([]byte, error) {
	return json.Marshal(clockStateJSON{(*plainClockState)(&s), micros(s.Ahead)})
}

func (s *ClockState) UnmarshalJSON(text []byte) error {
	in := clockStateJSON{plainClockState: (*plainClockState)(s)}
	if err := json.Unmarshal(text, &in); err != nil {
		return err
	}
	s.Ahead = ofMicros(in.AheadUS)
	return nil
}
