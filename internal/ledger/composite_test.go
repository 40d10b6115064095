package ledger_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// nasty are texts that mean something in the text form of rows and arrays.
var nasty = []string{
	`plain`, ``, ` `, `null`, `NULL`, `"`, `""`, `\`, `\\`, `\"`, `"\`, `,`, `(`, `)`, `{`, `}`, `{"(a,1)"}`, `'`, `''`, `$1`, `$$`,
	"a\nb", "\t", "\r\n", "é", "日本", "\U0001F600", "a\u0001b", `{}`, `()`, `a,b`, `"a","b"`, `\x00`, `\u0000`, strings.Repeat(`\"`, 60),
}

// Every text arrives at the server unchanged, in its own field.
func TestCharges_ComeToTheServerAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for i, text := range nasty {
		other := nasty[(i*7+3)%len(nasty)]
		charges := []ledger.Charge{
			{Scope: text, Key: math.MinInt64, Amount: 1 << 53, Held: 0, Note: `{"actor": "\"\\,(){}é"}`,
				Limits: []ledger.Limit{{Max: 1 << 62, Window: 36525 * 24 * time.Hour}, {Max: 0, Window: time.Microsecond}, {Max: 1, Window: 0}}},
			{Scope: other, Key: math.MaxInt64, Amount: 1, Held: 1},
		}
		var scopes []string
		var keys, amounts, held, maxima []int64
		var windows []time.Duration
		var note *string
		err := pool.QueryRow(t.Context(), `
			select array_agg(c.scope order by c.n), array_agg(c.key order by c.n), array_agg(c.amount order by c.n), array_agg(c.held order by c.n),
				(array_agg(c.note ->> 'actor' order by c.n))[1],
				(select array_agg(l.max) from unnest(($1::metered.new_charge[])[1].limits) l),
				(select array_agg(l.win) from unnest(($1::metered.new_charge[])[1].limits) l)
			from unnest($1::metered.new_charge[]) with ordinality c(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n)`, ledger.Charges(charges)).
			Scan(&scopes, &keys, &amounts, &held, &note, &maxima, &windows)
		require.NoError(t, err, "%q", text)
		require.Equal(t, []string{text, other}, scopes)
		require.Equal(t, []int64{math.MinInt64, math.MaxInt64}, keys)
		require.Equal(t, []int64{1 << 53, 1}, amounts)
		require.Equal(t, []int64{0, 1}, held)
		require.Equal(t, `"\,(){}é`, *note)
		require.Equal(t, []int64{1 << 62, 0, 1}, maxima)
		require.Equal(t, []time.Duration{36525 * 24 * time.Hour, time.Microsecond, 0}, windows)
	}
}

func TestHolds_ComeToTheServerAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	at := time.Date(2026, 2, 28, 23, 59, 59, 999_999_000, time.UTC)
	early := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, text := range nasty {
		other := nasty[(i*5+1)%len(nasty)]
		ids := ledger.HoldIDs{Tenant: text, Holder: other, IDs: []string{other, text}, Issued: []*time.Time{&at, nil}}
		var tenant, holder string
		var named []string
		var issued []*time.Time
		require.NoError(t, pool.QueryRow(t.Context(), `select ($1::metered.hold_ids).tenant, ($1::metered.hold_ids).ids, 
			array(select nullif(x, 'infinity') from unnest(($1::metered.hold_ids).issued) x), ($1::metered.hold_ids).holder`,
			ids.String()).Scan(&tenant, &named, &issued, &holder))
		require.Equal(t, []string{text, other, other, text}, []string{tenant, holder, named[0], named[1]})
		require.True(t, at.Equal(*issued[0]))
		require.Nil(t, issued[1])

		hold := ledger.NewHold{Tenant: text, ID: other, Chosen: true, Key: -5, Holder: text, Claim: other, Fingerprint: []byte{0, 1, 255, '"', '\\'},
			IssuedAt: &early, TTL: time.Microsecond, Grace: time.Hour, Lifetime: 87600 * time.Hour, Metadata: `{"a": "\\\"é"}`, Minimum: []ledger.Used{{Scope: text, Amount: 7}}}
		var got ledger.NewHold
		got.Minimum = make([]ledger.Used, 1)
		var claim *string
		require.NoError(t, pool.QueryRow(t.Context(), `select h.tenant, h.id, h.chosen, h.key, h.holder, h.claim, h.fingerprint, h.issued_at, h.ttl, h.grace, h.lifetime, h.metadata::text,
				h.minimum[1].scope, h.minimum[1].amount
			from (select ($1::metered.new_hold).*) h`, hold.String()).Scan(&got.Tenant, &got.ID, &got.Chosen, &got.Key, &got.Holder, &claim, &got.Fingerprint,
			&got.IssuedAt, &got.TTL, &got.Grace, &got.Lifetime, &got.Metadata, &got.Minimum[0].Scope, &got.Minimum[0].Amount))
		require.True(t, early.Equal(*got.IssuedAt))
		got.IssuedAt = hold.IssuedAt
		if claim != nil {
			got.Claim = *claim
		}
		require.Equal(t, hold, got)
	}
}
