package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

type fixture struct {
	*signup
	base  string
	clock *pgtest.Clock
}

func open(t *testing.T) *fixture {
	t.Helper()
	pool := exampletest.Open(t, usersSQL)
	s, err := newSignup(pool, 15*time.Minute)
	require.NoError(t, err)
	return &fixture{s, exampletest.Serve(t, s.handler()), pgtest.SetClock(t, pool, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))}
}

// visitorAt is a visitor, with a cookie of its own.
type visitorAt struct{ *examplehttp.Client }

func (f *fixture) visitor() visitorAt { return visitorAt{examplehttp.NewClient(f.base)} }

func (v visitorAt) claims(address string) examplehttp.Answer {
	return v.Do(context.Background(), "POST", "/claims", map[string]string{"email": address})
}

func (v visitorAt) confirms(claim, name string) examplehttp.Answer {
	return v.Do(context.Background(), "POST", "/claims/"+claim+"/confirm", map[string]string{"name": name})
}

func (v visitorAt) cancels(claim string) examplehttp.Answer {
	return v.Do(context.Background(), "DELETE", "/claims/"+claim, nil)
}

// users are all users, and with them the ledger is verified.
func (f *fixture) users(t *testing.T) []user {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `select id, email, name from users order by id`)
	require.NoError(t, err)
	users, err := pgx.CollectRows(rows, pgx.RowToStructByPos[user])
	require.NoError(t, err)
	pgtest.RequireVerified(t, f.pool, f.metered.Budget)
	return users
}

func decode[T any](t *testing.T, a examplehttp.Answer) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(a.Body), &v), a.Body)
	return v
}

func TestClaim_OfManyAtOnceOneHasTheAddress(t *testing.T) {
	t.Parallel()
	f := open(t)
	for round := range 5 {
		spellings := []string{"Ann%d@example.com", "ann%d@EXAMPLE.com", " ann%d@example.com "}
		visitors := make([]visitorAt, 40)
		won := 0
		for i, a := range exampledb.AtOnce(len(visitors), func(i int) examplehttp.Answer {
			visitors[i] = f.visitor()
			return visitors[i].claims(fmt.Sprintf(spellings[i%len(spellings)], round))
		}) {
			if a.Status == http.StatusCreated {
				won++
				require.Equal(t, http.StatusCreated, visitors[i].confirms(a.Field("id"), "Ann").Status)
				continue
			}
			require.Equal(t, http.StatusConflict, a.Status, a.Body)
			require.Equal(t, "900", a.Header.Get("Retry-After"))
			require.NotRegexp(t, claimID, a.Body)
		}
		require.Equal(t, 1, won)
	}
	require.Len(t, f.users(t), 5)
}

func TestClaim_TheSameVisitorGetsTheSameClaimAndDeadline(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	first := ann.claims("ann@example.com")
	require.Equal(t, http.StatusCreated, first.Status)
	require.Equal(t, 900, decode[claimed](t, first).ExpiresIn)
	f.clock.Advance(100 * time.Second)
	want := decode[claimed](t, first)
	want.ExpiresIn = 800
	for _, again := range exampledb.AtOnce(10, func(int) examplehttp.Answer { return ann.claims("Ann@Example.com") }) { // in other tabs
		require.Equal(t, http.StatusOK, again.Status)
		require.Equal(t, want, decode[claimed](t, again))
	}
	list, err := f.metered.Holds.List(t.Context(), f.pool, holds.Filter{})
	require.NoError(t, err)
	require.Len(t, list.Holds, 1)
}

// The address that is compared is not the one that mail goes to.
func TestConfirm_TheUserHasTheAddressAsItWasTyped(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	first := ann.claims(" Ann@Example.com ")
	require.Equal(t, http.StatusCreated, first.Status, first.Body)
	require.Equal(t, first.Field("id"), ann.claims("ann@example.com").Field("id"))
	require.Equal(t, http.StatusCreated, ann.confirms(first.Field("id"), "Ann").Status)
	require.Equal(t, "Ann@Example.com", f.users(t)[0].Email)
	require.Equal(t, http.StatusBadRequest, f.visitor().claims("ann").Status)
}

func TestConfirm_MakesOneUserHoweverOftenItIsSent(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	claim := ann.claims("ann@example.com").Field("id")
	answers := exampledb.AtOnce(10, func(int) examplehttp.Answer { return ann.confirms(claim, "Ann") })
	users := f.users(t)
	require.Equal(t, []user{{users[0].ID, "ann@example.com", "Ann"}}, users)
	for _, a := range answers {
		require.JSONEq(t, fmt.Sprintf(`{"id":%d,"email":"ann@example.com","name":"Ann"}`, users[0].ID), a.Body)
	}
	key := holds.Key{Type: emailType, Value: "ann@example.com"}
	claimed, err := f.metered.Holds.Claimed(t.Context(), f.pool, "", key)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint("user/", users[0].ID), claimed[key].Entity)

	require.Equal(t, http.StatusConflict, ann.confirms(claim, "Another").Status)
	require.Equal(t, http.StatusConflict, ann.cancels(claim).Status)
	f.clock.Advance(100 * 24 * time.Hour) // for good
	for _, b := range []visitorAt{ann, f.visitor()} {
		a := b.claims("ann@example.com")
		require.Equal(t, http.StatusConflict, a.Status)
		require.Empty(t, a.Header.Get("Retry-After"))
	}
	require.Len(t, f.users(t), 1)
}

func TestAbandoned_IsFreeWhenItsTimeIsOverAndNoSooner(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann, ben := f.visitor(), f.visitor()
	first := ann.claims("x@example.com").Field("id")
	f.clock.Advance(15*time.Minute - time.Microsecond)
	a := ben.claims("x@example.com")
	require.Equal(t, []any{http.StatusConflict, "1"}, []any{a.Status, a.Header.Get("Retry-After")})
	f.clock.Advance(time.Microsecond)
	require.Equal(t, http.StatusConflict, ann.confirms(first, "Ann").Status)
	require.Equal(t, http.StatusCreated, ben.claims("x@example.com").Status, "with nobody sweeping")
	require.Equal(t, http.StatusConflict, ann.confirms(first, "Ann").Status)
	require.Empty(t, f.users(t))
}

var claimID = regexp.MustCompile(`claim_[0-9a-f]`)

const noClaim = `{"title":"Not Found","status":404,"detail":"no such claim","code":"hold_unknown"}`

// For another visitor a claim in any state does not exist.
func TestStranger_LearnsAndChangesNothing(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann, eve := f.visitor(), f.visitor()
	eve.claims("eve@example.com") // has a cookie
	claim := ann.claims("ann@example.com").Field("id")
	try := func() {
		t.Helper()
		for _, id := range []string{claim, "claim_unknown"} {
			require.Equal(t, noClaim, eve.cancels(id).Body)
			require.Equal(t, noClaim, eve.confirms(id, "Eve").Body)
		}
	}
	try()
	require.Equal(t, http.StatusCreated, ann.confirms(claim, "Ann").Status)
	try()
	require.Len(t, f.users(t), 1)
}

// The program is run as a user would.
func TestSignup(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	program.Prints(
		`409 {"title":"Conflict","status":409,"detail":"somebody is signing up with this address","code":"claim_taken","retry_after_seconds":`,
		`404 {"title":"Not Found","status":404,"detail":"no such claim","code":"hold_unknown"}`,
		`201 {"id":1,"email":"ann@example.com","name":"Ann"}`,
		`409 {"title":"Conflict","status":409,"detail":"there is an account with this address","code":"claim_taken"}`,
		`409 {"title":"Conflict","status":409,"detail":"the claim has ended: claim the address again","code":"hold_`,
		"status and how many: map[201:1 409:19]",
	)

	program.Serve("-b jar ", "/claims", func(base string) {
		a := visitorAt{examplehttp.NewClient(base)}.claims("ann@example.com")
		require.Equal(t, 201, a.Status)
		require.Contains(t, a.Body, `"expires_in_seconds":900`)
	})
}
