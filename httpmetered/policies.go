package httpmetered

import (
	"encoding/base64"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
)

// Bounds. With all of them reached a field is about 4 kB long. Servers and proxies usually stop at
// 8 kB for all fields together.
const (
	maxPolicies  = 16 // of PoliciesConfig.Limits, and of PoliciesConfig.Shared
	maxNameBytes = 64 // of a name or a unit
	maxKeyBytes  = 32 // of a partition key: a SHA-256 fits
)

// The quota units that the draft defines. "requests" is its default and need not
// be said.
const (
	requests = "requests"
)

var errArgument = fault.New("invalid_argument", "httpmetered: invalid argument")

// PoliciesConfig names the limits to show.
type PoliciesConfig struct {
	// Limits are those of a client's own budget, each with a name of 1 to 64 printable ASCII
	// characters. Windows are rounded up to seconds, months to 31 days and years to 366. Prepaid
	// credit is no policy.
	Limits []budget.Limit

	// Shared are limits of several clients. They are named when they refuse, without numbers.
	Shared []budget.Limit

	// Units are the units of Limits, by name, such as "content-bytes". Defaults to "requests".
	Units map[string]string
}

// Policies are limits as clients see them. Nil and zero are none.
type Policies struct {
	shown  []policy
	shared []string // names
	header string   // RateLimit-Policy
	key    string   // the parameter pk, or ""
}

type policy struct {
	name   string
	item   string // the name as a String of structured fields
	params string
}

// NewPolicies fails with a *budget.ArgumentError.
func NewPolicies(cfg PoliciesConfig) (*Policies, error) {
	return policiesOf("PoliciesConfig", cfg)
}

// policiesOf names the fields of the caller's configuration in its errors.
func policiesOf(config string, cfg PoliciesConfig) (*Policies, error) {
	p := &Policies{}
	seen := map[string]bool{}
	for _, part := range []struct {
		field  string
		limits []budget.Limit
	}{{config + ".Limits", cfg.Limits}, {config + ".Shared", cfg.Shared}} {
		if len(part.limits) > maxPolicies {
			return nil, fault.Invalid(errArgument, part.field, "are %d, want at most %d",
				len(part.limits), maxPolicies)
		}
		for i, limit := range part.limits {
			field := part.field + "[" + strconv.Itoa(i) + "]"
			if err := check(field, limit); err != nil {
				return nil, err
			}
			if seen[limit.Name] {
				return nil, fault.Invalid(errArgument, field+".Name",
					"%q is the name of another limit", limit.Name)
			}
			seen[limit.Name] = true
		}
	}
	for _, limit := range cfg.Shared {
		p.shared = append(p.shared, limit.Name)
	}
	for name, unit := range cfg.Units {
		if !seen[name] || slices.Contains(p.shared, name) {
			return nil, fault.Invalid(errArgument, "PoliciesConfig.Units",
				"name %q, which is none of PoliciesConfig.Limits", name)
		}
		if err := checkText("PoliciesConfig.Units", unit); err != nil {
			return nil, err
		}
	}
	for _, limit := range cfg.Limits {
		if !limit.Observe { // a client must not keep to a limit that does not bite
			p.shown = append(p.shown, newPolicy(limit, cfg.Units[limit.Name]))
		}
	}
	p.header = p.policyField()
	return p, nil
}

func newPolicy(limit budget.Limit, unit string) policy {
	params := ";q=" + integer(limit.Max)
	if unit != "" && unit != requests {
		params += ";qu=" + quoted(unit)
	}
	if w := max(limit.Window, length(limit.Period)); w > 0 {
		params += ";w=" + seconds(w)
	}
	return policy{limit.Name, quoted(limit.Name), params}
}

// length is the longest that a period is, but for clocks that are set back.
func length(p budget.Period) time.Duration {
	const day = 24 * time.Hour
	if p.Unit == "" {
		return p.Length
	}
	return budget.Limit{Period: p}.Reach() - day
}

// Partition returns the policies with a partition key, the parameter pk of both fields: 1 to 32
// bytes of the request's content, not secret.
func (p *Policies) Partition(key []byte) (*Policies, error) {
	if err := fault.NotNil(errArgument, "policies", p); err != nil {
		return nil, err
	}
	if len(key) < 1 || len(key) > maxKeyBytes {
		return nil, fault.Invalid(errArgument, "key", "is %d bytes long, want 1 to %d", len(key), maxKeyBytes)
	}
	with := *p
	with.key = ";pk=:" + base64.StdEncoding.EncodeToString(key) + ":"
	with.header = with.policyField()
	return &with, nil
}

func (p *Policies) policyField() string {
	items := make([]string, len(p.shown))
	for i, policy := range p.shown {
		items[i] = policy.item + policy.params + p.key
	}
	return strings.Join(items, ", ")
}

func check(field string, limit budget.Limit) error {
	switch {
	case limit.Max < 0 || limit.Max > bounds.MaxLimit:
		return fault.Invalid(errArgument, field+".Max", "%d is not from 0 to %d", limit.Max,
			int64(bounds.MaxLimit))
	case !limit.Period.IsZero() && limit.Window == 0 && length(limit.Period) > 0:
	case !limit.Lifetime && !limit.Prepaid && (limit.Window <= 0 || limit.Window > bounds.MaxWindow):
		return fault.Invalid(errArgument, field+".Window", "%v is not from 1µs to %v", limit.Window,
			bounds.MaxWindow)
	}
	return checkText(field+".Name", limit.Name)
}

// checkText accepts the characters of a String of structured fields (RFC 9651, 3.3.3). None of them
// can end a field.
func checkText(field, text string) error {
	if len(text) < 1 || len(text) > maxNameBytes {
		return fault.Invalid(errArgument, field, "%q is %d bytes long, want 1 to %d", text,
			len(text), maxNameBytes)
	}
	for i := range len(text) {
		if text[i] < 0x20 || text[i] > 0x7e {
			return fault.Invalid(errArgument, field, "%q is not all printable ASCII", text)
		}
	}
	return nil
}

var escaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func quoted(text string) string { return `"` + escaper.Replace(text) + `"` }

// maxInteger is the largest Integer of structured fields.
const maxInteger = 999_999_999_999_999

func integer(n int64) string { return strconv.FormatInt(min(max(n, 0), maxInteger), 10) }

// seconds rounds up: whoever waits as long as it says has waited long enough.
func seconds(d time.Duration) string {
	n := int64(d / time.Second)
	if d%time.Second > 0 {
		n++
	}
	return integer(n)
}
