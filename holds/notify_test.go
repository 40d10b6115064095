package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
)

// listen returns what was notified since, without waiting for more.
func listen(t *testing.T, f *fixture) func() []string {
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	var got []string
	raw := conn.Conn().PgConn()
	_, err = conn.Exec(t.Context(), `listen `+pgx.Identifier{f.book.Channel()}.Sanitize())
	require.NoError(t, err)
	return func() []string {
		execute(t, f.pool, `select pg_notify($1, 'end')`, f.book.Channel())
		for !slices.Contains(got, "end") {
			require.NoError(t, raw.WaitForNotification(t.Context()))
			n := drain(conn.Conn())
			got = append(got, n...)
		}
		all := got[:len(got)-1]
		got = nil
		return all
	}
}

func drain(conn *pgx.Conn) (payloads []string) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for {
		n, err := conn.WaitForNotification(ctx) // what has arrived, and no more
		if err != nil {
			return payloads
		}
		payloads = append(payloads, payload(n))
	}
}

func payload(n *pgconn.Notification) string {
	var p struct {
		Tenant, ID, Kind string
		Version          int
	}
	if json.Unmarshal([]byte(n.Payload), &p) != nil {
		return n.Payload
	}
	return fmt.Sprint(p.Tenant, p.Kind, " ", p.ID, " ", p.Version)
}

func TestNotify_ArrivesWithTheCommitAndNeverAfterARollback(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]holds.Config{"plain": {Notify: true}, "with content": {NotifyContent: true}, "both": {Notify: true, NotifyContent: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			arrivesWithTheCommit(t, cfg)
		})
	}
}

func arrivesWithTheCommit(t *testing.T, cfg holds.Config) {
	f, w := subscribed(t, cfg)
	heard := listen(t, f)
	ctx := t.Context()
	place := func(tx pgx.Tx, id string) error {
		_, err := f.book.Place(ctx, tx, holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 9)}})
		return err
	}
	tx := begin(t, f.pool, pgx.ReadCommitted)
	require.NoError(t, place(tx, "h1"))
	w.veto["h2"] = true
	require.ErrorIs(t, place(tx, "h2"), errVeto)
	sub, err := tx.Begin(ctx)
	require.NoError(t, err)
	require.NoError(t, place(sub, "h3"))
	require.NoError(t, sub.Rollback(ctx))
	require.Empty(t, heard(), "not before the commit")
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, []string{"placed h1 1"}, heard())

	tx = begin(t, f.pool, pgx.ReadCommitted)
	_, err = f.book.Release(ctx, tx, holds.Release{IDs: []string{"h1"}})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	require.Empty(t, heard())

	f.mustPlace(holds.Request{ID: "h4", Lines: []holds.Line{capacity("b", 1, 1)}})
	_, err = f.extend(time.Second, "h1")
	require.NoError(t, err)
	require.Equal(t, []string{"placed h4 1", "extended h1 2"}, heard())
	f.clock.Advance(time.Hour)
	f.mustPlace(holds.Request{ID: "h5", Lines: []holds.Line{capacity("b", 1, 1)}})
	require.Equal(t, []string{"placed h5 1"}, heard(), "ended by the way: told by the sweeper")
	w.veto["h4"] = true
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.ErrorIs(t, err, errVeto)
	require.Equal(t, []string{"expired h1 3"}, heard())
	w.veto = nil
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []string{"expired h4 2"}, heard())
	_, err = f.capture(holds.Capture{IDs: []string{"h5"}, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, "h5"))
	require.NoError(t, err)
	require.Equal(t, []string{"captured h5 2", "returned h5 3"}, heard())
}
