package ledger

import (
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Plain reports whether charges go the short way, as charge_plain and complete_command_plain take them: one
// charge, with at most one limit by window or lifetime, and nothing that the full functions alone
// know. None at all are plain, too.
func (c *Charging) Plain() bool {
	if c == nil || len(c.Charges) == 0 {
		return true
	}
	x := &c.Charges[0]
	return len(c.Charges) == 1 && x.Held == 0 && x.Lease == nil && !x.MustExist && x.Use == "" && len(x.Limits) <= 1 &&
		(len(x.Limits) == 0 || x.Limits[0].Period.IsZero() && x.Limits[0].Thresholds == "")
}

// PlainArgs are the arguments of a plain charge: scope, key, amount, the most units and the window of
// its limit, note, and whether standings are asked for. All are null without charges.
func (c *Charging) PlainArgs() []any {
	if c == nil || len(c.Charges) == 0 {
		return []any{nil, nil, nil, nil, nil, nil, false}
	}
	x := &c.Charges[0]
	var most, window, note any
	if len(x.Limits) > 0 {
		most, window = x.Limits[0].Max, pgtype.Interval{Microseconds: x.Limits[0].Window.Microseconds(), Valid: true}
	}
	if x.Note != "" {
		note = x.Note
	}
	return []any{x.Scope, x.Key, x.Amount, most, window, note, c.Standing}
}

// full is an answer of the full functions as JSON.
type full struct {
	Seqs    []int64         `json:"seqs"`
	Ats     []int64         `json:"ats"`
	Used    []int64         `json:"used"`
	Held    []int64         `json:"held"`
	Refused json.RawMessage `json:"refused"`
	At      int64           `json:"at"`
	Crossed json.RawMessage `json:"crossed"`
}

// isShort reports whether an answer is that of the short way: an array.
func isShort(answer []byte) bool { return len(answer) > 0 && answer[0] == '[' }

// ScanPlain reads the answer of charge_plain.
func (a *Answer) ScanPlain(answer []byte, standing bool) error {
	if isShort(answer) {
		var short []int64
		err := json.Unmarshal(answer, &short)
		if err == nil {
			a.short(short, standing)
		}
		return err
	}
	_, err := a.full(answer)
	return err
}

// ScanCompleted reads the answer of complete_command_plain, which begins with the time of the record.
func (a *Answer) ScanCompleted(answer []byte, standing bool) (at time.Time, err error) {
	if isShort(answer) {
		var short []int64
		if err := json.Unmarshal(answer, &short); err != nil {
			return at, err
		}
		if len(short) > 1 {
			a.short(short[1:], standing)
		}
		return time.UnixMicro(short[0]), nil
	}
	return a.full(answer)
}

// short takes the answer of _append_short: seq, time, held units, and used units.
func (a *Answer) short(n []int64, standing bool) {
	a.Seqs, a.Ats, a.Held = n[:1:1], []time.Time{time.UnixMicro(n[1])}, n[2:3:3]
	if standing {
		a.Used = n[3:4:4]
	}
}

func (a *Answer) full(answer []byte) (at time.Time, err error) {
	var f full
	if err := json.Unmarshal(answer, &f); err != nil {
		return at, err
	}
	a.Seqs, a.Used, a.Held, a.Ats = f.Seqs, f.Used, f.Held, Moments(f.Ats)
	a.Refused, a.Crossed = present(f.Refused), present(f.Crossed)
	return time.UnixMicro(f.At), nil
}

// Moments are times in microseconds since 1970.
func Moments(us []int64) []time.Time {
	if us == nil {
		return nil
	}
	all := make([]time.Time, len(us))
	for i, n := range us {
		all[i] = time.UnixMicro(n)
	}
	return all
}

// present is JSON, or nil for its null.
func present(text json.RawMessage) []byte {
	if len(text) == 0 || string(text) == "null" {
		return nil
	}
	return text
}
