package budget

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/observe"
)

// Threshold is a level of use. The charge that reaches it calls Config.OnThreshold before it
// commits: once in a period, and else once until use has gone back by Rearm (docs/thresholds.md).
type Threshold struct {
	// Name tells the thresholds of a scope's limits apart: 1 to 64 bytes.
	Name string `json:"name"`

	// Percent is a level in percent of Max, from 1 to 1,000. It does not go with Prepaid. Without
	// Percent, Used and Left the level is 0 units left.
	Percent int64 `json:"percent,omitempty"`

	// Used is a level in used units, from 1 to 2^62.
	Used int64 `json:"used,omitempty"`

	// Left is a level in units that are left, from 1 to 2^62.
	Left int64 `json:"left,omitempty"`

	// Spent counts held units as available. Then a capture reports the level, and not the hold.
	Spent bool `json:"spent,omitempty"`

	// Rearm is how far use must go back before the threshold reports again: in percent for a
	// Percent, else in units. A threshold of a period does not need it. Defaults to a tenth of the
	// level, at least 1.
	Rearm int64 `json:"rearm,omitempty"`
}

// thresholdList is a list that can be compared, filled from the front.
type thresholdList [bounds.MaxThresholds]Threshold

// Crossing is a reached threshold. Other fields are as in a Standing.
type Crossing struct {
	// Scope is the scope whose limit has the threshold.
	Scope string `json:"scope"`

	// Seq is the entry that reached the level. It is unique together with Scope and the names of
	// limit and threshold.
	Seq int64 `json:"seq"`

	// At is the time of the entry.
	At time.Time `json:"at"`

	// Limit is the limit that has the threshold.
	Limit Limit `json:"limit"`

	// Threshold is the one that was reached.
	Threshold Threshold `json:"threshold"`

	// Used are the units that count after the entry, without held ones.
	Used int64 `json:"used"`

	// Held are the held units, with those that a capture frees.
	Held int64 `json:"held"`

	// Available is the most that the limit still lets in after the entry.
	Available int64 `json:"available"`

	// PeriodStart is as in a Standing.
	PeriodStart time.Time `json:"period_start,omitzero"`

	// PeriodEnd is as in a Standing.
	PeriodEnd time.Time `json:"period_end,omitzero"`
}

// WithThresholds returns the limit with up to 8 thresholds, in place of those it had. A scope remembers 64
// reported ones: a charge that reaches one more fails (budget_thresholds).
func (l Limit) WithThresholds(thresholds ...Threshold) Limit {
	if len(thresholds) == 0 {
		l.thresholds = unique.Handle[thresholdList]{}
		return l
	}
	var list thresholdList
	if copy(list[:], thresholds) < len(thresholds) {
		list[0] = Threshold{Name: tooMany} // check says so
	}
	l.thresholds = unique.Make(list)
	return l
}

// tooMany is longer than a name may be.
const tooMany = "\x00more than bounds.MaxThresholds\x00"

// Thresholds returns the limit's thresholds, as WithThresholds has set them.
func (l Limit) Thresholds() []Threshold {
	if !l.tells() {
		return nil
	}
	list := l.thresholds.Value()
	n := slices.IndexFunc(list[1:], func(t Threshold) bool { return t == Threshold{} }) + 1
	if n == 0 {
		n = len(list)
	}
	return list[:n:n]
}

func (l Limit) tells() bool { return l.thresholds != unique.Handle[thresholdList]{} }

// sentThresholds are the thresholds of a limit as they are sent.
type sentThresholds struct {
	err    error    // why they are refused
	keys   []string // the key of each in the ledger
	text   string
	tellAt *int64 // the lowest level
	spent  bool   // some count spent units alone
}

// sentCache has them by limit: to make them for each charge would take longer than all else in it.
var sentCache struct {
	sync.Map
	n atomic.Int32
}

const maxSentCache = 10_000

// sentThresholds returns those of a limit that has some.
func (l Limit) sentThresholds() *sentThresholds {
	l.query = nil
	if sent, ok := sentCache.Load(l); ok {
		return sent.(*sentThresholds)
	}
	if sentCache.n.Add(1) > maxSentCache {
		sentCache.Clear()
		sentCache.n.Store(1)
	}
	sent := l.makeThresholds()
	sentCache.Store(l, sent)
	return sent
}

func (l Limit) makeThresholds() *sentThresholds {
	all := l.Thresholds()
	sent := &sentThresholds{err: l.checkThresholds(all)}
	var text strings.Builder
	for i, t := range all {
		level, rearm := t.levels(l.Max)
		sent.keys = append(sent.keys, l.thresholdKey(t))
		if sent.tellAt == nil || level < *sent.tellAt {
			sent.tellAt = &level
		}
		sent.spent = sent.spent || t.Spent
		fmt.Fprintf(&text, "%s%d %d %s", []string{"", "\n"}[min(i, 1)], level, rearm, sent.keys[i])
	}
	sent.text = text.String()
	return sent
}

// checkThresholds names its field by ".Tell".
func (l Limit) checkThresholds(all []Threshold) error {
	const field = ".Tell"
	if len(l.Name) > bounds.MaxThresholdNameBytes || strings.Contains(l.Name, "\n") {
		return invalid(field, "is for a limit whose Name has at most %d bytes, in one line",
			bounds.MaxThresholdNameBytes)
	}
	for i, t := range all {
		if t.Name == tooMany {
			return invalid(field, "has more than %d thresholds", bounds.MaxThresholds)
		}
		if err := located(field, i, t.check(l)); err != nil {
			return err
		}
		if slices.ContainsFunc(all[:i], func(o Threshold) bool { return o.Name == t.Name }) {
			return invalid(index(field, i, ".Name"), "%q is there twice", t.Name)
		}
	}
	return nil
}

func (t Threshold) check(l Limit) error {
	if t.Name == "" || strings.Contains(t.Name, "\n") {
		return invalid(".Name", "is empty, or of several lines")
	}
	if err := checkText(".Name", t.Name, bounds.MaxThresholdNameBytes); err != nil {
		return err
	}
	levels := 0
	for _, level := range []int64{t.Percent, t.Used, t.Left} {
		if level != 0 {
			levels++
		}
	}
	switch {
	case levels > 1:
		return invalid(".Percent", "Used and Left exclude each other")
	case t.Percent < 0 || t.Percent > bounds.MaxPercent:
		return invalid(".Percent", "%d is not from 1 to %d", t.Percent, bounds.MaxPercent)
	case t.Percent > 0 && l.Prepaid:
		return invalid(".Percent", "is not for a limit of credit, of which there is no whole: write Left")
	case t.Used < 0 || t.Used > bounds.MaxLimit:
		return invalid(".Used", "%d is not from 1 to %d", t.Used, int64(bounds.MaxLimit))
	case t.Left < 0 || t.Left > bounds.MaxLimit:
		return invalid(".Left", "%d is not from 0 to %d", t.Left, int64(bounds.MaxLimit))
	case t.Rearm != 0 && !l.Period.IsZero():
		return invalid(".Rearm", "is not for a limit by period, which arms with each period")
	case t.Rearm < 0 || t.Rearm > bounds.MaxLimit || t.Percent > 0 && t.Rearm > t.Percent:
		return invalid(".Rearm", "%d is not from 1 to %d, or to Percent", t.Rearm, int64(bounds.MaxLimit))
	}
	return nil
}

// levels are the level and where it is armed again, in units used.
func (t Threshold) levels(most int64) (level, rearm int64) {
	if t.Percent > 100 { // beyond it all levels are MaxLimit, and nothing overflows
		most = min(most, bounds.MaxLimit/t.Percent*100)
	}
	back := t.Rearm
	if back == 0 {
		back = max(1, (t.Percent+t.Used+t.Left)/10)
	}
	switch {
	case t.Percent > 0:
		level = min(bounds.MaxLimit, most/100*t.Percent+(most%100*t.Percent+99)/100)
		rearm = most/100*(t.Percent-back) + most%100*(t.Percent-back)/100
		return level, min(rearm, level-1)
	case t.Used > 0:
		return t.Used, t.Used - back
	}
	level = most - t.Left
	return level, level - back
}

// thresholdKey is the key of a threshold in the ledger.
func (l Limit) thresholdKey(t Threshold) string {
	kind := "l"
	switch {
	case !l.Period.IsZero():
		kind = "p"
	case l.Window > 0:
		kind = "w"
	}
	if t.Spent {
		kind = strings.ToUpper(kind) // schema.sql goes by it
	}
	return kind + "/" + l.word() + "/" + t.Name
}

// checkKeys refuses two thresholds of one name in the limits of a scope.
func checkKeys(limits []Limit) error {
	var keys []string
	for _, l := range limits {
		if !l.tells() {
			continue
		}
		for i, key := range l.sentThresholds().keys {
			if slices.Contains(keys, key) {
				return invalid("thresholds",
					"two are called %q: give the limits names (Limit.Named)",
					l.Thresholds()[i].Name)
			}
			keys = append(keys, key)
		}
	}
	return nil
}

// Cross passes the crossings of a call to OnThreshold.
func (m *merged) Cross(ctx context.Context, tx pgx.Tx, crossed []byte) error {
	crossings, err := m.crossings(crossed)
	if err != nil {
		return err
	}
	return m.ledger.tellCrossings(ctx, tx, crossings)
}

func (l *Ledger) tellCrossings(ctx context.Context, tx pgx.Tx, crossings []Crossing) error {
	for _, c := range crossings {
		err := l.onThreshold(ctx, tx, c)
		if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'E' {
			err = errSwallowed // else whatever comes next in tx would fail for it
		}
		if err != nil {
			return &fault.Listener{Err: err,
				Doing: fmt.Sprintf("budget: OnThreshold: scope %q crosses %q", c.Scope,
					c.Threshold.Name)}
		}
		l.observer.Event(ctx, observe.Event{Kind: observe.Threshold,
			Name: c.Limit.word() + "/" + c.Threshold.Name, N: 1, Pending: true})
	}
	return nil
}

var errSwallowed = errors.New("budget: a statement of OnThreshold failed, and it returned no error")

// crossings reads the array that _cross_thresholds (internal/schema/sql/thresholds.sql) wrote.
func (m *merged) crossings(crossed []byte) ([]Crossing, error) {
	if len(crossed) == 0 {
		return nil, nil
	}
	var rows []struct {
		Crossing
		Key    string
		Period ledger.Periods
	}
	if err := json.Unmarshal(crossed, &rows); err != nil {
		return nil, failed("read a crossing", err)
	}
	crossings := make([]Crossing, len(rows))
	for i, row := range rows {
		c := row.Crossing
		scope := slices.IndexFunc(m.Charges, func(x ledger.Charge) bool { return x.Scope == c.Scope })
		if scope < 0 {
			return nil, fmt.Errorf("budget: the schema answers a threshold of scope %q, which was not charged", c.Scope)
		}
		for _, l := range m.limits[scope] {
			if !l.tells() {
				continue
			}
			if n := slices.Index(l.sentThresholds().keys, row.Key); n >= 0 {
				c.Limit, c.Threshold = l, l.Thresholds()[n]
			}
		}
		c.At, c.Available = c.At.UTC(), available(c.Limit.Max, c.Used, c.Held)
		c.PeriodStart, c.PeriodEnd = row.Period.Next()
		crossings[i] = c
	}
	return crossings, nil
}
