package holds_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
)

// Who places a hold again that has ended is told how, by an answer and by an error alike.
func TestPlace_OfAHoldThatHasEndedSaysHow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ends := map[holds.State]func(id string){
		holds.Captured: func(id string) {
			_, err := f.capture(holds.Capture{IDs: []string{id}, All: true})
			require.NoError(t, err)
		},
		holds.Released: func(id string) { _, err := f.release(id); require.NoError(t, err) },
		holds.Expired:  func(string) {},
		"swept": func(id string) {
			h := f.get(id)
			f.clock.Set(h.Due)
			_, status, err := f.expire(holds.Expire{ID: id, Deadline: h.Deadline})
			require.NoError(t, err)
			require.Equal(t, holds.ExpiredNow, status)
		},
	}
	request := func(id string) holds.Request {
		return holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity(id, 1, 1)}}
	}
	for how, end := range ends {
		f.mustPlace(request(string(how)))
		end(string(how))
	}
	f.clock.Advance(time.Hour)
	for how := range ends {
		want := map[bool]holds.State{true: holds.Expired, false: how}[how == "swept"]
		p, err := placeHold(f.book, request(string(how)))
		require.NoError(t, err)
		for _, raising := range []bool{false, true} {
			tx := begin(t, f.pool, pgx.ReadCommitted)
			_, err := p.Scan(tx.QueryRow(t.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 5000, Raising: raising})...))
			var state *holds.StateError
			require.ErrorAs(t, err, &state, "%s, %v", how, raising)
			require.Equal(t, []any{string(how), want, want}, []any{state.ID, state.State, state.Hold.State}, raising)
			require.Equal(t, raising, tx.Commit(t.Context()) != nil, "the transaction is usable unless it was to fail")
		}
	}
	f.verify()
}

// An entry names its hold, unless it is about several at once.
func TestEntries_NameTheHoldThatTheyAreAbout(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	place := func(ids ...string) {
		for _, id := range ids {
			f.mustPlace(holds.Request{ID: id, Lines: []holds.Line{capacity("a", 2, 9)}})
		}
	}
	place("1", "2", "3", "4")
	_, err := f.capture(holds.Capture{IDs: []string{"1"}, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
	require.NoError(t, err)
	_, err = f.release("2")
	require.NoError(t, err)
	_, err = f.release("3", "4")
	require.NoError(t, err)
	place("5", "6", "7")
	f.clock.Advance(time.Minute)
	_, _, err = f.expire(holds.Expire{ID: "5", Deadline: f.clock.Now()})
	require.NoError(t, err)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	var got []string
	for e, err := range f.ledger.Entries(t.Context(), f.pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		got = append(got, fmt.Sprintf("%s %d %s", e.Kind, e.Amount, e.Hold))
	}
	require.Equal(t, []string{
		"hold 2 1", "hold 2 2", "hold 2 3", "hold 2 4", "capture 1 1", "release 1 1", "release 2 2", "release 4 ",
		"hold 2 5", "hold 2 6", "hold 2 7", "expire 2 5", "expire 4 ",
	}, got)
}
