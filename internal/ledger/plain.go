package ledger

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Plain reports whether charges go the short way, as charge_plain and complete_command_plain take
// them: one charge, with at most one limit by window or lifetime, and nothing that the full
// functions alone know. None at all are plain, too.
func (c *Charging) Plain() bool {
	if c == nil || len(c.Charges) == 0 {
		return true
	}
	return len(c.Charges) == 1 && c.Charges[0].Held == 0 && c.Charges[0].plain()
}

// Short is the statement by which charges go the short way, and their arguments: plain, for those
// that are Plain, or total, for a plain one with a limit and one without limits, such as a total of
// all users. It is "" for others.
func (c *Charging) Short(plain, total string) (sql string, args []any) {
	switch {
	case c.Plain():
		return plain, c.PlainArgs()
	case c.withTotal():
		return total, c.totalArgs()
	}
	return "", nil
}

// withTotal reports whether charges are as charge_total and complete_command_total take them.
func (c *Charging) withTotal() bool {
	if c == nil || len(c.Charges) != 2 {
		return false
	}
	own, total := c.pair()
	return own.Held == 0 && len(own.Limits) == 1 && own.plain() && total.sum()
}

// pair is the charge of two that has limits, and the other one.
func (c *Charging) pair() (own, total *Charge) {
	if len(c.Charges[0].Limits) == 0 {
		return &c.Charges[1], &c.Charges[0]
	}
	return &c.Charges[0], &c.Charges[1]
}

// totalFirst reports whether the total is the first of two charges.
func (c *Charging) totalFirst() bool { return len(c.Charges[0].Limits) == 0 }

// totalArgs are the arguments of two charges with a total: those of PlainArgs for the one with a
// limit, and the total's scope, key, amount and note, and whether it comes first.
func (c *Charging) totalArgs() []any {
	own, total := c.pair()
	args := (&Charging{Charges: []Charge{*own}, Standing: c.Standing}).PlainArgs()
	var note any
	if total.Note != "" {
		note = total.Note
	}
	return append(args, total.Scope, total.Key, total.Amount, note, c.totalFirst())
}

// PlainHold is Plain for a placement, all of whose units are held.
func (c *Charging) PlainHold() bool {
	return len(c.Charges) == 1 && c.Charges[0].Held == c.Charges[0].Amount && c.Charges[0].plain()
}

func (x *Charge) plain() bool {
	return x.Lease == nil && !x.MustExist && x.Use == "" && !tells(x.Limits) &&
		(len(x.Limits) == 0 || len(x.Limits) == 1 && x.Limits[0].Period.IsZero())
}

// PlainArgs are the arguments of a plain charge: scope, key, amount, the most units and the window
// of its limit, note, and whether standings are asked for. All are null without charges.
func (c *Charging) PlainArgs() []any {
	args := make([]any, 7)
	args[6] = false
	if c == nil || len(c.Charges) == 0 {
		return args
	}
	x := &c.Charges[0]
	args[0], args[1], args[2], args[6] = x.Scope, x.Key, x.Amount, c.Standing
	if len(x.Limits) > 0 {
		args[3], args[4] = x.Limits[0].Max, plainInterval(x.Limits[0].Window)
	}
	if x.Note != "" {
		args[5] = x.Note
	}
	return args
}

// PlainPlacing are the arguments of place_plain and open_session_plain from the hold's tenant on to
// the operation. A made up id has no key.
func (c *Charging) PlainPlacing(h NewHold, keyed bool, s Sending) []any {
	var lifetime, metadata any
	if h.Lifetime > 0 {
		lifetime = plainInterval(h.Lifetime)
	}
	if h.Metadata != "" {
		metadata = h.Metadata
	}
	args := []any{h.Tenant, h.ID}
	if keyed && h.Chosen {
		args = append(args, h.Key)
	} else if keyed {
		args = append(args, nil)
	}
	args = append(args, h.Holder, h.Fingerprint, h.IssuedAt, plainInterval(h.TTL), plainInterval(h.Grace), lifetime, metadata)
	args = append(args, c.PlainArgs()[:6]...)
	return append(args, s.PlainOrigin()...)
}

// PlainOrigin are the tenant and the id of the command, null without one.
func (s Sending) PlainOrigin() []any {
	if s.Operation == "" {
		return []any{nil, nil}
	}
	return []any{s.Tenant, s.Operation}
}

func plainInterval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}

// Placed is the answer of place and open_session.
type Placed struct {
	Status          string
	At, Deadline    *time.Time
	Seqs            []int64
	Ats             []time.Time
	Refused, Stored []byte
	Crossed         []byte
}

// ScanPlain reads the answer of place_plain or open_session_plain, about a hold of that length.
func (p *Placed) ScanPlain(answer []byte, ttl time.Duration) error {
	if isShort(answer) {
		var short []int64
		if err := json.Unmarshal(answer, &short); err != nil {
			return err
		}
		at := time.UnixMicro(short[1])
		deadline := at.Add(ttl)
		*p = Placed{Status: "placed", At: &at, Deadline: &deadline}
		return nil
	}
	var f struct {
		Status   string          `json:"status"`
		At       *int64          `json:"placed_at"`
		Deadline *int64          `json:"deadline"`
		Refused  json.RawMessage `json:"refused"`
		Stored   *string         `json:"stored"`
		Crossed  json.RawMessage `json:"crossed"`
	}
	err := json.Unmarshal(answer, &f)
	*p = Placed{
		Status: f.Status, At: timeOf(f.At), Deadline: timeOf(f.Deadline),
		Refused: present(f.Refused), Crossed: present(f.Crossed),
	}
	if f.Stored != nil {
		p.Stored = []byte(*f.Stored)
	}
	return err
}

func timeOf(us *int64) *time.Time {
	if us == nil {
		return nil
	}
	t := time.UnixMicro(*us)
	return &t
}

// Captured reads the answer of capture_holds_plain: a hold, or an array of the answer of
// capture_holds.
func Captured(answer []byte) (refused []byte, holds [][]byte, crossed []byte, err error) {
	if !isArray(answer) {
		return nil, [][]byte{answer}, nil, nil
	}
	var refusal *string
	var texts []string
	var reached json.RawMessage
	if err := json.Unmarshal(answer, &[]any{&refusal, &texts, &reached}); err != nil {
		return nil, nil, nil, err
	}
	for _, text := range texts {
		holds = append(holds, []byte(text))
	}
	if refusal != nil {
		refused = []byte(*refusal)
	}
	return refused, holds, present(reached), nil
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
	Periods []int64         `json:"periods"`
}

// isShort reports whether an answer is that of the short way: an array.
func isShort(answer []byte) bool { return isArray(answer) }

func isArray(answer []byte) bool { return len(answer) > 0 && answer[0] == '[' }

// ScanPlain reads the answer of charge_plain or charge_total to the charges.
func (a *Answer) ScanPlain(answer []byte, of *Charging) error {
	if isShort(answer) {
		var short []int64
		err := json.Unmarshal(answer, &short)
		if err == nil {
			a.short(short, of)
		}
		return err
	}
	_, err := a.full(answer)
	return err
}

// ScanCompleted reads the answer of complete_command_plain or complete_command_total, which begins with the time of the
// record.
func (a *Answer) ScanCompleted(answer []byte, of *Charging) (at time.Time, err error) {
	if isShort(answer) {
		var short []int64
		if err := json.Unmarshal(answer, &short); err != nil {
			return at, err
		}
		if len(short) > 1 {
			a.short(short[1:], of)
		}
		return time.UnixMicro(short[0]), nil
	}
	return a.full(answer)
}

// short takes the answer of charge_plain: seq, time, held units and used units. That of charge_total
// has the seq of the total beyond, which is its time in microseconds, less than 0.
func (a *Answer) short(n []int64, of *Charging) {
	a.Seqs, a.Ats, a.Held = []int64{n[0]}, []time.Time{time.UnixMicro(n[1])}, []int64{n[2]}
	if of.Standing {
		a.Used = []int64{n[3]}
	}
	if len(n) > 4 {
		at := 1
		if of.totalFirst() {
			at = 0
		}
		a.Seqs = slices.Insert(a.Seqs, at, n[4])
		a.Ats = slices.Insert(a.Ats, at, time.UnixMicro(-n[4]))
		a.Held = slices.Insert(a.Held, at, 0)
	}
}

func (a *Answer) full(answer []byte) (at time.Time, err error) {
	var f full
	if err := json.Unmarshal(answer, &f); err != nil {
		return at, err
	}
	a.Seqs, a.Used, a.Held, a.Ats, a.Periods = f.Seqs, f.Used, f.Held, Moments(f.Ats), Moments(f.Periods)
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
