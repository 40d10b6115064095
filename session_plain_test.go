package metered_test

import (
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// ownPart is the part of a session's hold that no other has.
var ownPart = regexp.MustCompile(`(session_[0-9a-f]{32}_)[\w-]{16}`)

// sameWays has two databases of which one takes the full way, and does a thing in both.
type sameWays struct {
	*testing.T
	pools   [2]*pgxpool.Pool
	clients [2]*metered.Client
	clocks  [2]*pgtest.Clock
}

func bothWays(t *testing.T) *sameWays {
	w := &sameWays{T: t}
	at := pgtest.Tomorrow(12)
	for i := range w.pools {
		w.pools[i], w.clients[i] = pgtest.SetUp(t, metered.Config{})
		w.clocks[i] = pgtest.SetClock(t, w.pools[i], at)
	}
	pgtest.Execute(t, w.pools[1], `create or replace function metered._goes_short() returns boolean language sql immutable as 'select false'`)
	return w
}

// same does it both ways, and demands the same answer.
func (w *sameWays) same(what string, do func(i int) (any, error)) string {
	w.Helper()
	var said [2]string
	for i := range said {
		answer, err := do(i)
		said[i] = ownPart.ReplaceAllString(fmt.Sprintf("%+v, %v", answer, err), "$1")
	}
	require.Equal(w, said[1], said[0], what)
	return said[0]
}

// A session that is settled without a function, by one statement, is answered and recorded as by
// the full functions, whatever became of its id and of its hold.
func TestSettle_WithoutAFunctionIsAsTheFullWay(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w := bothWays(t)
	none := func(int, string) (any, error) { return nil, nil }
	for n, test := range []struct {
		name   string
		lines  int
		used   metered.Cost
		before func(i int, id string) (any, error)
		says   string
	}{
		{"all", 1, metered.Cost{All: true}, none, "<nil>"},
		{"a part, with an entity and a note", 1, metered.Cost{Lines: tokensUsed(7).Lines, Entity: "order", Note: budget.Note{Actor: "ann"}}, none, "<nil>"},
		{"nothing", 1, tokensUsed(0), none, "<nil>"},
		{"more than is held", 1, tokensUsed(101), none, "exceeds the open units"},
		{"two lines", 2, metered.Cost{All: true}, none, "<nil>"},
		{"the id is on record", 1, metered.Cost{All: true}, func(i int, id string) (any, error) {
			return metered.Do(ctx, w.clients[i], metered.Command{Tenant: "acme", ID: id, Input: "another"}, says(3))
		}, "another"},
		{"the id is retired", 1, metered.Cost{All: true}, func(i int, _ string) (any, error) {
			return w.pools[i].Exec(ctx, "update metered.operations_horizon set at = $1", w.clocks[i].Now().Add(-time.Hour))
		}, "older than the retained records"},
		{"it was released", 1, metered.Cost{All: true}, func(i int, id string) (any, error) {
			s, err := metered.Resume[usage](ctx, w.clients[i], metered.Reservation{Tenant: "acme", ID: id})
			if err == nil {
				err = s.Cancel(ctx, "enough")
			}
			return nil, err
		}, "lost"},
		{"it is due", 1, metered.Cost{All: true}, func(i int, _ string) (any, error) {
			w.clocks[i].Advance(2 * time.Minute)
			return nil, nil
		}, "lost"},
	} {
		id := fmt.Sprint("op ", n)
		var sessions [2]*metered.Session[usage]
		w.same(test.name+": open", func(i int) (_ any, err error) {
			r := stream(id)
			r.Charges, r.IssuedAt = nil, w.clocks[i].Now().Add(-2*time.Hour)
			if test.lines > 1 {
				r.Lines = append(r.Lines, holds.Line{Scope: "images", Amount: 5})
			}
			sessions[i], err = metered.Open[usage](ctx, w.clients[i], r)
			if err == nil {
				t.Cleanup(sessions[i].Close)
			}
			return nil, err
		})
		w.same(test.name+": before", func(i int) (any, error) { return test.before(i, id) })
		for range 2 {
			said := w.same(test.name, func(i int) (any, error) { return sessions[i].Settle(ctx, test.used, nil) })
			require.Contains(t, said, test.says, test.name)
		}
		for i, c := range w.clocks {
			c.Advance(time.Second)
			pgtest.Execute(t, w.pools[i], "update metered.operations_horizon set at = '-infinity'")
		}
	}
	for table, but := range map[string]string{"operations": "", "ledger": "next_due", "holds": "issued_at", "hold_lines": "", "hold_events": ""} {
		w.same(table, func(i int) (any, error) {
			rows, err := w.pools[i].Query(ctx, `select (to_jsonb(y) - 'anchor_at' - 'anchor_spent' - $1::text)::text from metered.`+table+` y order by 1`, but)
			require.NoError(t, err)
			return pgx.CollectRows(rows, pgx.RowTo[string])
		})
	}
	require.Equal(t, [2]int64{207, 0}, stands(t, w.pools[0], w.clients[0], "tokens"))
}

// A record of the id that appears while a session is settled by one statement takes all of it back.
func TestSettle_ARecordThatAppearsMeanwhileTakesItBack(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	for _, sql := range []string{
		"create sequence times",
		`create function appears() returns trigger language plpgsql as $$ begin
			if new.kind = 'c' and nextval('public.times') = 1 then
				insert into metered.operations (tenant, id, at, fingerprint, result)
				values ('acme', 'op', clock_timestamp(), decode(repeat('00', 33), 'hex'), '');
			end if;
			return null;
		end $$`,
		"create trigger appears after insert on metered.hold_events for each row execute function appears()",
		"grant usage on sequence times to public",
	} {
		pgtest.Execute(t, pool, sql)
	}
	r := stream("op")
	r.Charges = nil
	s, err := metered.Open[usage](t.Context(), c, r)
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Settle(t.Context(), tokensUsed(7), nil)
	require.NoError(t, err)
	require.Equal(t, 2, pgtest.Value[int](t, pool, "select last_value from times"), "the first attempt failed")
	require.Equal(t, 1, pgtest.Value[int](t, pool, "select count(*) from metered.operations where cardinality(holds) = 1"))
	require.Equal(t, [2]int64{7, 0}, stands(t, pool, c, "tokens"))
}
