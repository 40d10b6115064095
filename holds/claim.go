package holds

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// Key names a thing. Bytes are compared: normalise a value first (golang.org/x/text/secure/precis).
type Key struct {
	// Type is what kind of thing it is, such as "email".
	Type string `json:"type"`

	// Value is the thing itself, such as an address.
	Value string `json:"value"`
}

// Claim is a hold on a Key, for one holder at a time.
type Claim struct {
	// Tenant keeps the keys of tenants apart.
	Tenant string

	// Key is the value to claim. Neither of its parts is empty, and its Scope has up to 255 bytes.
	// Required.
	Key Key

	// Holder is who claims the value. Required.
	Holder string

	// Lines are as in Placement, beside the claim's own unit.
	Lines []Line

	// Charges are as in Placement: spent at once, for good.
	Charges []budget.Charge

	// MustExist refuses a Key.Scope that was not created, as in budget.Charge.
	MustExist bool

	// TTL is as in Placement, and so are Grace, Metadata and Note.
	TTL time.Duration

	// Grace is as in Placement.
	Grace time.Duration

	// Metadata is as in Placement. A repeated claim keeps the first one.
	Metadata json.RawMessage

	// Note is as in Placement.
	Note budget.Note

	// Reveal sets TakenError.By, for callers who may know the other holder.
	Reveal bool
}

// Claim places a hold on a key, which has at most one active claim: held and not due, or captured
// (confirmed) and not given back (Return).
//
// A holder who repeats an unconfirmed claim gets the same one (Created = false), or ErrConflict for
// other lines or charges. Others get a *TakenError, as does the holder of a confirmed claim. Locks
// and other errors are those of Place.
func (b *Book) Claim(ctx context.Context, tx pgx.Tx, c Claim) (Hold, error) {
	return first(do(ctx, tx, b, "holds.claim", (*Book).prepareClaim, c))
}

// prepareClaim validates a claim as Claim does, without any SQL.
func (b *Book) prepareClaim(c Claim) (*call, error) {
	if c.Holder == "" {
		return nil, invalid("Claim.Holder", "is empty")
	}
	scope, err := claimScope(c.Tenant, c.Key)
	if err != nil {
		return nil, err
	}
	lines := append([]Line{{Scope: scope, Amount: 1,
		Limits: []budget.Limit{budget.Lifetime(1).Named("claim")}, MustExist: c.MustExist}},
		c.Lines...)
	for i, line := range lines[1:] {
		if line.Scope == scope {
			return nil, invalid(index("Claim.Lines", i, ".Scope"), "is that of the claim")
		}
	}
	return b.preparePlace(Placement{
		ID: claimIDs(scope) + uuidv7.New(), Tenant: c.Tenant, Holder: c.Holder, Lines: lines,
		Charges: c.Charges,
		TTL:     c.TTL, Grace: c.Grace, Metadata: c.Metadata, Note: c.Note, claim: scope, key: c.Key,
		reveal: c.Reveal,
	})
}

// claimPrefix begins the ids of claims. A digest of the key, "_" and the UUID of the generation
// follow.
const claimPrefix = "claim_"

// claimIDs begins the ids of the claims of a key.
func claimIDs(scope string) string {
	sum := sha256.Sum256([]byte(scope))
	return fmt.Sprintf("%s%x_", claimPrefix, sum[:16])
}

// issuedAt is the time that an id carries, nil for none.
func issuedAt(id string) *time.Time {
	for _, prefix := range []string{claimPrefix, sessionPrefix} {
		switch generation, ok := strings.CutPrefix(id, prefix); {
		case ok && len(generation) == 69:
			id = generation[33:]
		case ok && len(generation) == 49:
			return uuidv7.TimeOfShort(generation[33:])
		}
	}
	return uuidv7.Time(id)
}

// Scope is the scope of the key's claims, for budget.Ledger.Create.
func (k Key) Scope(tenant string) (string, error) { return claimScope(tenant, k) }

// claimScope is the scope of a key. Its parts cannot run into each other.
func claimScope(tenant string, key Key) (string, error) {
	switch {
	case key.Type == "":
		return "", invalid("Key.Type", "is empty")
	case key.Value == "":
		return "", invalid("Key.Value", "is empty")
	}
	for field, text := range map[string]string{"Key.Type": key.Type, "Key.Value": key.Value, "Tenant": tenant} {
		if err := checkText(field, text); err != nil {
			return "", err
		}
	}
	scope := budget.ScopeKey("claim", budget.ScopeKey(key.Type, key.Value, tenant), "")
	if len(scope) > bounds.MaxScopeBytes {
		return "", invalid("Key.Value", "makes a scope of %d bytes, want at most %d: claim a digest of it", len(scope), bounds.MaxScopeBytes)
	}
	return scope, nil
}

// parseClaim is the inverse of claimScope, without the tenant.
func parseClaim(scope string) (Key, error) {
	_, inner, _, err := inBudget.SplitScope(scope)
	if err != nil {
		return Key{}, fmt.Errorf("holds: read a claim: %w", err)
	}
	kind, value, _, err := inBudget.SplitScope(inner)
	if err != nil {
		return Key{}, fmt.Errorf("holds: read a claim: %w", err)
	}
	return Key{Type: kind, Value: value}, nil
}

// A subquery for each key finds its claim by the index. A join could be planned as a scan of the
// whole table.
const claimedSQL = `
select (select metered.hold_json(h.no, c.now) from metered.holds h
    where h.claim = k.scope and (h.state = 'h' or h.state = 'c' and not h.returned))
from (select metered.clock() as now) c, pg_catalog.unnest($1::text[]) with ordinality k(scope, n)
order by k.n`

// Claimed returns the active claims of up to 10,000 keys of a tenant, from one snapshot.
func (b *Book) Claimed(ctx context.Context, db budget.Querier, tenant string,
	keys ...Key) (map[Key]Hold, error) {
	if err := cmp.Or(b.made(), notNil("db", db)); err != nil {
		return nil, err
	}
	if len(keys) > bounds.MaxKeys {
		return nil, invalid("keys", "are %d, want at most %d", len(keys), bounds.MaxKeys)
	}
	scopes := make([]string, len(keys))
	for i, key := range keys {
		var err error
		if scopes[i], err = claimScope(tenant, key); err != nil {
			return nil, ofKey(i, err)
		}
	}
	// Planned at each call: a plan kept from when the table was small scans all of it for each key.
	rows, err := answer.Query(ctx, db, b.sql.claimed, pgx.QueryExecModeExec, scopes)
	if err != nil {
		return nil, failed("claimed", err)
	}
	claimed := map[Key]Hold{}
	i := -1
	var raw []byte
	_, err = pgx.ForEachRow(rows, []any{&raw}, func() error {
		i++
		var h Hold
		if raw == nil {
			return nil
		}
		if err := h.decode(raw); err != nil || h.State == Expired {
			return err
		}
		claimed[keys[i]] = h
		return nil
	})
	if err != nil {
		return nil, failed("claimed", err)
	}
	return claimed, nil
}

// ofKey names the key of a list that err is about.
func ofKey(i int, err error) error {
	var argument *budget.ArgumentError
	if errors.As(err, &argument) && strings.HasPrefix(argument.Field, "Key.") {
		return invalid(index("keys", i, strings.TrimPrefix(argument.Field, "Key")), "%s", argument.Reason)
	}
	return err
}
