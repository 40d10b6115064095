package jobs

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/jsonb"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/ledger"
)

// prepared is a job whose arguments have been checked.
type prepared struct {
	args   river.JobArgs
	opts   river.InsertOpts // with the queue resolved and our metadata added
	kind   string
	key    string
	tenant string
	digest []byte // of a keyed job

	parking *ledger.Parking // of a job with Options.Hold
	burst   *ledger.Parking // of one with Options.Burst, too
	waits   waits
	late    *late // its command parks it, at its end
}

func (p *prepared) ident() ident { return ident{p.opts.Queue, p.key} }

// prepare checks everything that can be checked without the database, so that no
// wrong argument costs the caller its transaction. at is how the caller reached
// them: "" or "Items[3].".
func (e *Enqueuer) prepare(at string, args river.JobArgs, opts *Options) (*prepared, error) {
	if err := notNil(at+"Args", args); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &Options{}
	}
	p := &prepared{args: args, opts: opts.InsertOpts, kind: args.Kind(), key: opts.Key, tenant: opts.Tenant}
	if n := utf8.RuneCountInString(p.kind); n < 1 || n > 127 || !storable(p.kind) {
		return nil, invalid(at+"Args", "kind %q: want 1 to 127 characters of UTF-8 without NUL", p.kind)
	}
	if len(p.key) > maxKeyBytes || !storable(p.key) {
		return nil, invalid(at+"Options.Key", "want 1 to %d bytes of UTF-8 without NUL", maxKeyBytes)
	}
	if len(p.tenant) > maxTenantBytes || !storable(p.tenant) {
		return nil, invalid(at+"Options.Tenant", "want at most %d bytes of UTF-8 without NUL", maxTenantBytes)
	}
	encoded, err := json.Marshal(args)
	if err != nil {
		return nil, invalid(at+"Args", "cannot be encoded as JSON: %s", err)
	}
	if err := cmp.Or(jsontext.Check(args, encoded), jsonb.Check(encoded)); err != nil {
		return nil, invalid(at+"Args", "as JSON: %s", err)
	}
	if err := p.resolve(at + "Options.InsertOpts."); err != nil {
		return nil, err
	}
	p.opts.Metadata, err = withOwn(at+"Options.InsertOpts.Metadata", p.opts.Metadata,
		ownMetadata{Key: p.key, Tenant: p.tenant})
	if err != nil {
		return nil, err
	}
	if opts.Hold != nil {
		if err := e.prepareHold(at, p, opts); err != nil {
			return nil, err
		}
		// Limits may have changed since, and do not count.
		for _, choice := range p.choices() {
			encoded = append(encoded, 0)
			for _, c := range choice.Charges {
				encoded = fmt.Appendf(encoded, "%q %d %d\n", c.Scope, c.Amount, c.Held)
			}
		}
	} else if err := noWaits(at, opts); err != nil {
		return nil, err
	}
	if p.key != "" {
		p.digest = digest(p.kind, encoded)
	}
	return p, nil
}

// The queues and tags that River accepts.
var (
	queuePattern = regexp.MustCompile(`^[a-z0-9]+(?:[_|\-]?[a-z0-9]+)*$`)
	tagPattern   = regexp.MustCompile(`\A\w[\w\-]+\w\z`)
)

// resolve follows River's precedence (option, then the args' own, then default) for
// the fields that must be known before the key is claimed. The queue is then passed on, so
// that River cannot come to another.
func (p *prepared) resolve(at string) error {
	var own river.InsertOpts
	if withOpts, ok := p.args.(river.JobArgsWithInsertOpts); ok {
		own = withOpts.InsertOpts()
	}
	p.opts.Queue = cmp.Or(p.opts.Queue, own.Queue, river.QueueDefault)
	if len(p.opts.Queue) > 64 || !queuePattern.MatchString(p.opts.Queue) {
		return invalid(at+"Queue", "%.80q: want 1 to 64 of a-z and 0-9, with single _ - | between",
			p.opts.Queue)
	}
	if n := cmp.Or(p.opts.Priority, own.Priority); n < 0 || n > river.PriorityDefault+3 {
		return invalid(at+"Priority", "%d: want 1 to 4, or 0 for the default", n)
	}
	if n := cmp.Or(p.opts.MaxAttempts, own.MaxAttempts); n < 0 || n > math.MaxInt16 {
		return invalid(at+"MaxAttempts", "%d: want 1 to %d, or 0 for the default", n, math.MaxInt16)
	}
	tags := p.opts.Tags
	if tags == nil {
		tags = own.Tags
	}
	for _, tag := range tags {
		if len(tag) > 255 || !tagPattern.MatchString(tag) {
			return invalid(at+"Tags", "%.80q: want 3 to 255 of a-z, A-Z, 0-9, _ and, inside, -", tag)
		}
	}
	scheduled := p.opts.ScheduledAt
	if scheduled.IsZero() {
		scheduled = own.ScheduledAt
	}
	if year := scheduled.Year(); year < 1 || year > 9999 {
		return invalid(at+"ScheduledAt", "the year %d is not from 1 to 9999", year)
	}
	if p.key != "" && (isUnique(p.opts.UniqueOpts) || isUnique(own.UniqueOpts)) {
		return invalid(at+"UniqueOpts", "cannot be combined with a key (they may come from the args' own InsertOpts method)")
	}
	return nil
}

func isUnique(o river.UniqueOpts) bool {
	return o.ByArgs || o.ByPeriod != 0 || o.ByQueue || o.ByState != nil || o.ExcludeKind
}

// storable reports whether Postgres takes s as text.
func storable(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

// differs reports the difference between p and the first use of its key, or "".
func (p *prepared) differs(first claim) string {
	switch {
	case p.kind != first.kind:
		return differsKind
	case p.tenant != first.tenant:
		return differsTenant
	case !bytes.Equal(p.digest, first.digest):
		return differsArgs
	}
	return ""
}
