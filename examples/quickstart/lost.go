package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// breaker stands between the program and Postgres, inside TLS if there is TLS. When armed it cuts the first connection on
// which the server says that it has committed, and swallows the message.
type breaker struct {
	armed atomic.Bool
	cuts  atomic.Int64
}

func (b *breaker) wrap(_ context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
	return &breakableConn{Conn: conn, breaker: b}, nil
}

type breakableConn struct {
	net.Conn
	breaker *breaker
	tail    []byte // of the read before: a message may come in two parts
}

// committed is the message CommandComplete of COMMIT: its type, its length, the tag.
var committed = []byte("C\x00\x00\x00\x0bCOMMIT\x00")

func (c *breakableConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	seen := append(c.tail, p[:n]...)
	if bytes.Contains(seen, committed) && c.breaker.armed.CompareAndSwap(true, false) {
		c.breaker.cuts.Add(1)
		_ = c.Conn.Close()
		return 0, net.ErrClosed
	}
	c.tail = bytes.Clone(seen[max(0, len(seen)-len(committed)+1):])
	return n, err
}

// crash has the command's connection killed when all is written but the charge, which the flush of COMMIT makes.
func (s *story) crash(ctx context.Context) {
	s.title("A crash between the writes and the commit")
	request := s.prepare(ctx, account, upload{Name: "crash.txt", Content: []byte("sent by a process that will not live to commit it\n")})[0]
	before := must(count(ctx, s.db.Pool))
	a := must(newApp(s.db.Pool, s.app.plans))
	var inside counts
	killed := errors.New("killed")
	a.written = func(ctx context.Context, tx *metered.Tx) (err error) {
		if inside, err = count(ctx, tx); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		s.line("its server process: %v", err)
		return killed
	}
	_, err := a.upload(ctx, request)
	check(s.report, "the command failed", errors.Is(err, killed), true)
	want := before
	want.Spent, want.Rows, want.Jobs = want.Spent+1, want.Rows+1, want.Jobs+1
	check(s.report, "in its transaction a moment before", inside, want)
	s.unchanged(ctx, before)
	s.unspent(ctx, request)
	check(s.report, "the same operation again, status", s.send(ctx, request).Status, http.StatusCreated)
}

func (s *story) lostAcknowledgement(ctx context.Context) {
	s.title("A lost acknowledgement: the server commits, the connection dies, nobody hears")
	request := s.prepare(ctx, account, upload{Name: "lost.txt", Content: []byte("stored, but was it?\n")})[0]
	config := must(pgxpool.ParseConfig(s.db.ConnString))
	b := &breaker{}
	config.ConnConfig.AfterNetConnect = b.wrap
	pool := must(pgxpool.NewWithConfig(ctx, config))
	defer pool.Close()
	a := must(newApp(pool, s.app.plans))
	runs := 0
	a.written = func(context.Context, *metered.Tx) error {
		runs++
		b.armed.Store(true) // the next COMMIT is this command's
		return nil
	}
	before := must(count(ctx, s.db.Pool))
	out, err := a.upload(ctx, request)
	if err != nil {
		ok(fmt.Errorf("the lost acknowledgement was not resolved: %w", err))
	}
	check(s.report, "acknowledgements of COMMIT thrown away, connections cut", b.cuts.Load(), 1)
	check(s.report, "Do found out by itself: replayed", out.Replayed, true)
	check(s.report, "runs of the command's function", runs, 1)
	check(s.report, "one more of each in the database", must(count(ctx, s.db.Pool)),
		counts{before.Entries + 1, before.Operations + 1, before.Spent + 1, before.Rows + 1, before.Jobs + 1})
	check(s.report, "bytes charged, as its receipt says", out.Receipt.Entries[0].Amount, cost(len(request.Content)))
}
