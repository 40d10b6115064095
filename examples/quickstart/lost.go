package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
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

func (s *story) lostAcknowledgement(ctx context.Context) {
	s.title("A lost acknowledgement: the server commits, the connection dies, nobody hears")
	request := s.prepare(ctx, file{"lost.txt", []byte("stored, but was it?\n")})
	config := must(pgxpool.ParseConfig(s.db.ConnString()))
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
	u := upload{request.operation, request.account, request.token, request.file.Name, request.file.Content}
	out, err := a.upload(ctx, u)
	if err != nil {
		ok(fmt.Errorf("the lost acknowledgement was not resolved: %w", err))
	}
	check(s.report, "acknowledgements of COMMIT thrown away, connections cut", b.cuts.Load(), 1)
	check(s.report, "Do found out by itself: replayed", out.Replayed, true)
	check(s.report, "runs of the command's function", runs, 1)
	s.executedOnce(ctx, u, out, before)
}

// executedOnce checks that there is one more of everything, and that it is the operation's.
func (s *story) executedOnce(ctx context.Context, u upload, out metered.Outcome[stored], before counts) {
	after := must(count(ctx, s.db.Pool))
	want := counts{before.Entries + 1, before.Operations + 1, before.Spent + 1, before.Rows + 1, before.Jobs + 1}
	check(s.report, "one more of each in the database", after, want)
	scope := scopeOf(u.Account)
	var seqs []int64
	for e, err := range s.app.metered.Budget.Entries(ctx, s.db.Pool, scope, budget.EntriesOptions{}) {
		ok(err)
		if e.OperationTenant == u.Account && e.Operation == u.Operation {
			seqs = append(seqs, e.Seq)
		}
	}
	charged := out.Receipt.Entries[0]
	check(s.report, "its entries in the ledger, by number", fmt.Sprint(seqs), fmt.Sprint([]int64{charged.Seq}))
	check(s.report, "bytes charged, as its receipt says", charged.Amount, cost(len(u.Content)))
}
