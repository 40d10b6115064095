package holds_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
)

// Who places a hold again that has ended is told how, by an answer and by an error alike.
func TestPlace_OfAHoldThatHasEndedSaysHow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ends := map[holds.State]func(id string){
		holds.Captured: func(id string) { _, err := f.capture(holds.Capture{IDs: []string{id}}); require.NoError(t, err) },
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
		p, err := f.book.PreparePlace(request(string(how)))
		require.NoError(t, err)
		for _, raising := range []bool{false, true} {
			tx := begin(t, f.pool, pgx.ReadCommitted)
			_, err := p.Scan(tx.QueryRow(t.Context(), p.SQL(), p.Args("", "", raising)...))
			var state *holds.StateError
			require.ErrorAs(t, err, &state, "%s, %v", how, raising)
			require.Equal(t, []any{string(how), want, want}, []any{state.ID, state.State, state.Hold.State}, raising)
			require.Equal(t, raising, tx.Commit(t.Context()) != nil, "the transaction is usable unless it was to fail")
		}
	}
	f.verify()
}
