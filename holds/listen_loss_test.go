package holds_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
)

func TestListen_ALostConnectionIsMadeAgainAndReported(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	var lost atomic.Int32
	l := startListening(t, f.pool, holds.ListenOptions{OnError: func(err error) {
		assert.ErrorContains(t, err, "holds: listen: ")
		lost.Add(1)
	}})
	for i, id := range []string{"h1", "h2", "h3"} {
		l.missed()
		f.mustPlace(holds.Request{ID: id, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
		l.hears(notice(id, 1, holds.EventPlaced))
		require.EqualValues(t, i, lost.Load())
		var ended int
		require.NoError(t, f.pool.QueryRow(t.Context(), `
			select count(*) from (select pg_terminate_backend(pid) from pg_stat_activity
			where datname = current_database() and query like 'listen %') x`).Scan(&ended))
		require.Equal(t, 1, ended)
	}
	l.missed()
}

func TestListen_SurvivesARestartOfTheServer(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	pool, err := pgxpool.New(t.Context(), server.ConnString())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = metered.Migrate(t.Context(), pool, metered.MigrateOptions{})
	require.NoError(t, err)
	f := on(t, pool, holds.Config{Notify: true}, nil)

	failed := make(chan error, 100)
	l := startListening(t, pool, holds.ListenOptions{OnError: func(err error) {
		select {
		case failed <- err:
		default:
		}
	}})
	l.missed()
	require.NoError(t, server.Kill())
	for range 3 { // the loss, and attempts while there is no server
		<-failed
	}
	require.NoError(t, server.Restart(t.Context()))
	l.missed()
	pool.Reset()
	f.mustPlace(holds.Request{ID: "h1", Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	l.hears(notice("h1", 1, holds.EventPlaced))

	require.NoError(t, server.Kill())
	<-failed
	l.stop()
	require.ErrorIs(t, l.end(), context.Canceled, "also while there is no server")
}

// A network that swallows everything closes no connection.
func TestListen_NoticesAConnectionThatDiedWithoutAWord(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	var dead atomic.Bool
	var dialled atomic.Int32
	pool := another(t, f.pool, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			server, err := dial(ctx, network, addr)
			if err != nil || dialled.Add(1) > 1 {
				return server, err
			}
			return swallowing(server, &dead), nil
		}
	})
	l := startListening(t, pool, holds.ListenOptions{Idle: 200 * time.Millisecond})
	l.missed()
	dead.Store(true)
	f.mustPlace(holds.Request{ID: "h1", Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	l.missed()
	require.Equal(t, holds.Held, f.get("h1").State)
	f.mustPlace(holds.Request{ID: "h2", Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	l.hears(notice("h2", 1, holds.EventPlaced))
}

// swallowing returns a connection to server that carries nothing once it is dead.
func swallowing(server net.Conn, dead *atomic.Bool) net.Conn {
	client, inner := net.Pipe()
	forward := func(to, from net.Conn) {
		defer to.Close()
		buffer := make([]byte, 8192)
		for {
			n, err := from.Read(buffer)
			if n > 0 && !dead.Load() {
				_, err = to.Write(buffer[:n])
			}
			if err != nil {
				return
			}
		}
	}
	go forward(server, inner)
	go forward(inner, server)
	return client
}

func TestListen_AnIdleConnectionThatAnswersIsKept(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	asked := make(chan struct{}, 100)
	pool := another(t, f.pool, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			return &counted{Conn: conn, wrote: asked}, err
		}
	})
	l := startListening(t, pool, holds.ListenOptions{Idle: 500 * time.Millisecond})
	l.missed()
	for len(asked) > 0 {
		<-asked
	}
	for range 3 {
		<-asked
	}
	f.mustPlace(holds.Request{ID: "h1", Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	l.hears(notice("h1", 1, holds.EventPlaced)) // and not Missed before it
}

// counted tells of everything that is written to a connection.
type counted struct {
	net.Conn
	wrote chan struct{}
}

func (c *counted) Write(b []byte) (int, error) {
	select {
	case c.wrote <- struct{}{}:
	default:
	}
	return c.Conn.Write(b)
}
