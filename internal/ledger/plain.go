package ledger

import (
	"encoding/binary"
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Plain reports whether charges go the short way, as charge_plain and complete_command_plain take
// them: one charge, with at most one limit, and nothing that the full functions alone know. None at
// all are plain, too.
func (c *Charging) Plain() bool {
	if c == nil || len(c.Charges) == 0 {
		return true
	}
	return len(c.Charges) == 1 && c.Charges[0].Held == 0 && c.Charges[0].plain()
}

// Short is the statement by which charges go the short way, and args with their arguments: plain,
// for those that are Plain, or total, for a plain one with a limit and one without limits, such as
// a total of all users. It is "" for others.
//
// With telling, the thresholds of its limit are reported: only the full function does that.
func (c *Charging) Short(plain, total string, args []any, telling bool) (sql string, all []any) {
	switch {
	case c.Plain():
		return plain, c.appendPlain(args, telling)
	case c.withTotal():
		return total, c.appendTotal(args, telling)
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

// appendTotal appends the arguments of two charges with a total: those of appendPlain for the one
// with a limit, and the total's scope, key, amount and note, and whether it comes first.
func (c *Charging) appendTotal(args []any, telling bool) []any {
	own, total := c.pair()
	args = append(c.appendTelling(args, own, telling), c.Standing, total.Scope, total.Key, total.Amount)
	return append(args, orNull(total.Note), c.totalFirst())
}

// PlainHold is Plain for a placement, all of whose units are held.
func (c *Charging) PlainHold() bool {
	return len(c.Charges) == 1 && c.Charges[0].Held == c.Charges[0].Amount && c.Charges[0].plain() &&
		!tells(c.Charges[0].Limits)
}

func (x *Charge) plain() bool {
	return x.Lease == nil && !x.MustExist && x.Use == "" && len(x.Limits) <= 1
}

// appendPlain appends the arguments of a plain charge, and whether standings are asked for. All are
// null without charges.
func (c *Charging) appendPlain(args []any, telling bool) []any {
	if c == nil || len(c.Charges) == 0 {
		return append(args, nil, nil, nil, nil, nil, nil, nil, nil, nil, false)
	}
	return append(c.appendTelling(args, &c.Charges[0], telling), c.Standing)
}

// appendTelling appends scope, key and amount of a charge, the most units and the window or period
// of its limit, the note, and the limit itself, where it has thresholds or is by period. With
// thresholds the most units are too few to reach the lowest of them. With neither a window nor a
// period that is known the short way admits nothing.
func (c *Charging) appendTelling(args []any, x *Charge, telling bool) []any {
	args = append(args, x.Scope, x.Key, x.Amount)
	if c.sent = (span{}); len(x.Limits) == 0 {
		return append(args, nil, nil, nil, nil, orNull(x.Note), nil)
	}
	limit, most := x.Limits[0], x.Limits[0].Max
	if limit.TellAt != nil {
		most = min(most, *limit.TellAt-1)
	}
	var window, since, until, whole any
	switch limit.Telling = telling && limit.Thresholds != ""; {
	case limit.Telling:
	case limit.Period.IsZero():
		window = plainInterval(limit.Window)
	default:
		if c.sent = c.Spans.of(limit.Period); c.sent.until != 0 {
			since, until = time.UnixMicro(c.sent.since), time.UnixMicro(c.sent.until)
		}
	}
	if limit.Thresholds != "" || !limit.Period.IsZero() {
		whole = limit.String()
	}
	return append(args, most, window, since, until, orNull(x.Note), whole)
}

// orNull is a text as an argument, null for none.
func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

// PlainPlacing are the arguments of place_plain and open_session_plain from the hold's tenant on to
// the operation. A made up id has no key.
func (c *Charging) PlainPlacing(h NewHold, keyed bool, s Sending) []any {
	args := append(make([]any, 0, 27), h.Tenant, h.ID)
	if keyed && h.Chosen {
		args = append(args, h.Key)
	} else if keyed {
		args = append(args, nil)
	}
	args = append(args, h.Holder, h.Fingerprint, h.IssuedAt, plainInterval(h.TTL), plainInterval(h.Grace))
	if h.Lifetime > 0 {
		args = append(args, plainInterval(h.Lifetime))
	} else {
		args = append(args, nil)
	}
	args = c.appendTelling(append(args, orNull(h.Metadata)), &c.Charges[0], false)
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

// ScanPlain reads the answer of place_plain or open_session_plain to charges, about a hold of that
// length.
func (p *Placed) ScanPlain(answer []byte, of *Charging, ttl time.Duration) error {
	if isArray(answer) {
		short, err := parseShort(answer)
		if err != nil {
			return err
		}
		at := time.UnixMicro(short.n[1])
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
		Told     []int64         `json:"told"`
	}
	err := json.Unmarshal(answer, &f)
	of.told(f.Told)
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

// ConsumedToken reads the answer of consume_token_plain. The status of a grant is "ok", of which
// the answer has no letter.
func ConsumedToken(answer []byte) TokenRow {
	const numbers = 4 + 3*8
	if len(answer) < numbers || answer[0] != 0 {
		status := string(answer)
		return TokenRow{Status: &status}
	}
	status, left := "ok", int32(binary.BigEndian.Uint32(answer))
	var at [3]time.Time
	for i := range at {
		at[i] = time.UnixMicro(since2000 + int64(binary.BigEndian.Uint64(answer[4+8*i:])))
	}
	row := TokenRow{Status: &status, UsesLeft: &left, MintedAt: &at[0], ExpiresAt: &at[1], ConsumedAt: &at[2]}
	if len(answer) > numbers {
		row.Payload = answer[numbers:]
	}
	return row
}

// since2000 are the microseconds between 1970 and 2000, where the server's times begin.
const since2000 = 946_684_800_000_000

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
	Told    []int64         `json:"told"`
}

// isArray reports whether an answer is that of the short way.
func isArray(answer []byte) bool { return len(answer) > 0 && answer[0] == '[' }

// short is an answer of the short way: whole numbers.
type short struct {
	n   [8]int64
	len int
}

var errShort = &json.UnmarshalTypeError{Value: "array", Type: reflect.TypeFor[short]()}

// parseShort reads a JSON array of whole numbers.
func parseShort(answer []byte) (s short, err error) {
	for from := 1; from < len(answer); s.len++ {
		end := slices.IndexFunc(answer[from:], func(c byte) bool { return c == ',' || c == ']' })
		if end < 0 || s.len == len(s.n) {
			return s, errShort
		}
		number := strings.TrimSpace(string(answer[from : from+end]))
		if s.n[s.len], err = strconv.ParseInt(number, 10, 64); err != nil {
			return s, errShort
		}
		from += end + 1
	}
	return s, nil
}

// ScanPlain reads the answer of charge_plain or charge_total to the charges.
func (a *Answer) ScanPlain(answer []byte, of *Charging) error {
	if isArray(answer) {
		short, err := parseShort(answer)
		if err == nil {
			a.short(short.n[:short.len], of)
		}
		return err
	}
	_, err := a.full(answer, of)
	return err
}

// ScanCompleted reads the answer of complete_command_plain or complete_command_total, which begins with the time of the
// record.
func (a *Answer) ScanCompleted(answer []byte, of *Charging) (at time.Time, err error) {
	if isArray(answer) {
		short, err := parseShort(answer)
		if err != nil {
			return at, err
		}
		if short.len > 1 {
			a.short(short.n[1:short.len], of)
		}
		return time.UnixMicro(short.n[0]), nil
	}
	return a.full(answer, of)
}

// short takes the answer of charge_plain: seq, time, held units and used units. That of charge_total
// has the seq of the total beyond, which is its time in microseconds, less than 0.
func (a *Answer) short(n []int64, of *Charging) {
	a.Seqs, a.Ats, a.Held = []int64{n[0]}, []time.Time{time.UnixMicro(n[1])}, []int64{n[2]}
	if of.Standing {
		a.Used = []int64{n[3]}
		if of.sent.until != 0 {
			a.Periods = Periods{time.UnixMicro(of.sent.since + 1), time.UnixMicro(of.sent.until)}
		}
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

func (a *Answer) full(answer []byte, of *Charging) (at time.Time, err error) {
	var f full
	if err := json.Unmarshal(answer, &f); err != nil {
		return at, err
	}
	of.told(f.Told)
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
