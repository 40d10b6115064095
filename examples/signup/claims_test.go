package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

type fixture struct {
	*signup
	base  string
	clock *pgtest.Clock
}

func open(t *testing.T) *fixture {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), usersSQL)
	require.NoError(t, err)
	s, err := newSignup(pool, 15*time.Minute)
	require.NoError(t, err)
	server := httptest.NewServer(s.handler())
	t.Cleanup(server.Close)
	return &fixture{s, server.URL, pgtest.SetClock(t, pool, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))}
}

func (f *fixture) visitor() *browser { return newBrowser(f.base) }

func email(text string) map[string]string { return map[string]string{"email": text} }

func named(name string) map[string]string { return map[string]string{"name": name} }

// users are all users, and with them the ledger is verified.
func (f *fixture) users(t *testing.T) []user {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `select id, email, name from users order by id`)
	require.NoError(t, err)
	users, err := pgx.CollectRows(rows, pgx.RowToStructByPos[user])
	require.NoError(t, err)
	report, err := f.metered.Budget.Verify(t.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	return users
}

func decode[T any](t *testing.T, a reply) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(a.Body), &v), a.Body)
	return v
}

func TestClaim_OfManyAtOnceOneHasTheAddress(t *testing.T) {
	t.Parallel()
	f := open(t)
	for round := range 5 {
		spellings := []string{"Ann%d@example.com", "ann%d@EXAMPLE.com", " ann%d@example.com "}
		var mu sync.Mutex
		var won []*browser
		var claims []string
		var wg sync.WaitGroup
		for i := range 40 {
			b := f.visitor()
			wg.Go(func() {
				a := b.do(context.Background(), "POST", "/claims", email(fmt.Sprintf(spellings[i%len(spellings)], round)))
				mu.Lock()
				defer mu.Unlock()
				switch a.Status {
				case http.StatusCreated:
					won, claims = append(won, b), append(claims, a.ID)
				case http.StatusConflict:
					if a.RetryAfter != "900" || claimID.MatchString(a.Body) {
						t.Errorf("%+v", a)
					}
				default:
					t.Errorf("%+v", a)
				}
			})
		}
		wg.Wait()
		require.Len(t, won, 1)
		require.Equal(t, http.StatusCreated, won[0].do(t.Context(), "POST", "/claims/"+claims[0]+"/confirm", named("Ann")).Status)
	}
	require.Len(t, f.users(t), 5)
}

func TestClaim_TheSameVisitorGetsTheSameClaimAndDeadline(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	first := ann.do(t.Context(), "POST", "/claims", email("ann@example.com"))
	require.Equal(t, http.StatusCreated, first.Status)
	require.Equal(t, 900, decode[claimed](t, first).ExpiresIn)
	f.clock.Advance(100 * time.Second)
	var wg sync.WaitGroup
	for range 10 { // in other tabs
		wg.Go(func() {
			again := ann.do(context.Background(), "POST", "/claims", email("Ann@Example.com"))
			if again.Status != http.StatusOK {
				t.Errorf("%+v", again)
				return
			}
			want := decode[claimed](t, first)
			want.ExpiresIn = 800
			if got := decode[claimed](t, again); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
	wg.Wait()
	list, err := f.metered.Holds.List(t.Context(), f.pool, holds.Filter{})
	require.NoError(t, err)
	require.Len(t, list.Holds, 1)
}

// The address that is compared is not the one that mail goes to.
func TestConfirm_TheUserHasTheAddressAsItWasTyped(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	first := ann.do(t.Context(), "POST", "/claims", email(" Ann@Example.com "))
	require.Equal(t, http.StatusCreated, first.Status, first.Body)
	require.Equal(t, first.ID, ann.do(t.Context(), "POST", "/claims", email("ann@example.com")).ID)
	require.Equal(t, http.StatusCreated, ann.do(t.Context(), "POST", "/claims/"+first.ID+"/confirm", named("Ann")).Status)
	require.Equal(t, "Ann@Example.com", f.users(t)[0].Email)
	require.Equal(t, http.StatusBadRequest, f.visitor().do(t.Context(), "POST", "/claims", email("ann")).Status)
}

func TestConfirm_MakesOneUserHoweverOftenItIsSent(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann := f.visitor()
	claim := ann.do(t.Context(), "POST", "/claims", email("ann@example.com")).ID
	bodies := make([]string, 10)
	var wg sync.WaitGroup
	for i := range bodies {
		wg.Go(func() {
			bodies[i] = ann.do(context.Background(), "POST", "/claims/"+claim+"/confirm", named("Ann")).Body
		})
	}
	wg.Wait()
	users := f.users(t)
	require.Equal(t, []user{{users[0].ID, "ann@example.com", "Ann"}}, users)
	for _, body := range bodies {
		require.JSONEq(t, fmt.Sprintf(`{"id":%d,"email":"ann@example.com","name":"Ann"}`, users[0].ID), body)
	}
	key := holds.Key{Type: emailType, Value: "ann@example.com"}
	claimed, err := f.metered.Holds.Claimed(t.Context(), f.pool, "", key)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint("user/", users[0].ID), claimed[key].Entity)

	require.Equal(t, http.StatusConflict, ann.do(t.Context(), "POST", "/claims/"+claim+"/confirm", named("Another")).Status)
	require.Equal(t, http.StatusConflict, ann.do(t.Context(), "DELETE", "/claims/"+claim, nil).Status)
	f.clock.Advance(100 * 24 * time.Hour) // for good
	for _, b := range []*browser{ann, f.visitor()} {
		a := b.do(t.Context(), "POST", "/claims", email("ann@example.com"))
		require.Equal(t, http.StatusConflict, a.Status)
		require.Empty(t, a.RetryAfter)
	}
	require.Len(t, f.users(t), 1)
}

func TestAbandoned_IsFreeWhenItsTimeIsOverAndNoSooner(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann, ben := f.visitor(), f.visitor()
	first := ann.do(t.Context(), "POST", "/claims", email("x@example.com")).ID
	f.clock.Advance(15*time.Minute - time.Microsecond)
	a := ben.do(t.Context(), "POST", "/claims", email("x@example.com"))
	require.Equal(t, []any{http.StatusConflict, "1"}, []any{a.Status, a.RetryAfter})
	f.clock.Advance(time.Microsecond)
	require.Equal(t, http.StatusConflict, ann.do(t.Context(), "POST", "/claims/"+first+"/confirm", named("Ann")).Status)
	require.Equal(t, http.StatusCreated, ben.do(t.Context(), "POST", "/claims", email("x@example.com")).Status, "with nobody sweeping")
	require.Equal(t, http.StatusConflict, ann.do(t.Context(), "POST", "/claims/"+first+"/confirm", named("Ann")).Status)
	require.Empty(t, f.users(t))
}

var claimID = regexp.MustCompile(`claim_[0-9a-f]`)

const noClaim = `{"title":"Not Found","status":404,"detail":"no such claim","code":"hold_unknown"}` + "\n"

// For another visitor a claim in any state does not exist.
func TestStranger_LearnsAndChangesNothing(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann, eve := f.visitor(), f.visitor()
	eve.do(t.Context(), "POST", "/claims", email("eve@example.com")) // has a cookie
	claim := ann.do(t.Context(), "POST", "/claims", email("ann@example.com")).ID
	try := func() {
		t.Helper()
		for _, id := range []string{claim, "claim_unknown"} {
			require.Equal(t, reply{Status: 404, Body: noClaim}, eve.do(t.Context(), "DELETE", "/claims/"+id, nil))
			require.Equal(t, reply{Status: 404, Body: noClaim}, eve.do(t.Context(), "POST", "/claims/"+id+"/confirm", named("Eve")))
		}
	}
	try()
	require.Equal(t, http.StatusCreated, ann.do(t.Context(), "POST", "/claims/"+claim+"/confirm", named("Ann")).Status)
	try()
	require.Len(t, f.users(t), 1)
}

func TestCancel_FreesTheAddressAtOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	ann, ben := f.visitor(), f.visitor()
	first := ann.do(t.Context(), "POST", "/claims", email("x@example.com")).ID
	for range 2 {
		require.Equal(t, http.StatusNoContent, ann.do(t.Context(), "DELETE", "/claims/"+first, nil).Status)
	}
	second := ben.do(t.Context(), "POST", "/claims", email("x@example.com"))
	require.Equal(t, http.StatusCreated, second.Status)
	require.NotEqual(t, first, second.ID)
	require.Equal(t, http.StatusConflict, ann.do(t.Context(), "POST", "/claims/"+first+"/confirm", named("Ann")).Status)
	require.Equal(t, http.StatusNoContent, ann.do(t.Context(), "DELETE", "/claims/"+first, nil).Status)
	require.Equal(t, http.StatusCreated, ben.do(t.Context(), "POST", "/claims/"+second.ID+"/confirm", named("Ben")).Status)
	require.Len(t, f.users(t), 1)
}
