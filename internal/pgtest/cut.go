package pgtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Cutter sits between a pool and its server, counts the messages of both, and cuts the connection
// at one of them.
type Cutter struct {
	mu      sync.Mutex
	n, at   int
	cut     func()
	refused bool // new connections fail
	ending  bool // counts COMMIT and the messages after it alone
}

// Cut returns a pool on the same database that runs through a Cutter.
func Cut(t testing.TB, pool *pgxpool.Pool) (*pgxpool.Pool, *Cutter) {
	t.Helper()
	if pool.Config().ConnConfig.TLSConfig != nil {
		t.Skip("messages cannot be counted through TLS")
	}
	c := &Cutter{}
	return Reopen(t, pool, func(config *pgxpool.Config) {
		config.ShouldPing = noPing
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c.mu.Lock()
			refused := c.refused
			c.mu.Unlock()
			if refused {
				return nil, io.ErrClosedPipe
			}
			conn, err := dial(ctx, network, addr)
			return &counted{Conn: conn, cutter: c}, err
		}
	}), c
}

// Arm counts messages from here. Message number at, from 1, is lost with its connection, and then
// cut is called. 0 loses none.
func (c *Cutter) Arm(at int, cut func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n, c.at, c.cut, c.ending = 0, at, cut, false
}

// ArmAtCommit is Arm that counts only COMMITs and the messages until the answer to each is
// complete.
func (c *Cutter) ArmAtCommit(at int, cut func()) {
	c.Arm(at, cut)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ending = true
}

// Count is how many messages there were since then.
func (c *Cutter) Count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// Refuse says whether new connections fail.
func (c *Cutter) Refuse(yes bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused = yes
}

// count reports whether the connection is cut at this message. commits says whether it is at COMMIT
// or after it.
func (c *Cutter) count(commits bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ending && !commits {
		return false
	}
	c.n++
	return c.n == c.at
}

// counted is a connection whose messages are counted, from its first ReadyForQuery on.
type counted struct {
	net.Conn
	cutter *Cutter

	mu             sync.Mutex
	ready, lost    bool
	commits        bool   // COMMIT was sent, and is not answered
	sent, got, out []byte // incomplete messages of the client and of the server, and bytes to be read
}

// whole is the length of the first message of b with a type, or 0 if it is not there.
func whole(b []byte) int {
	if len(b) < 5 {
		return 0
	}
	if n := 1 + int(binary.BigEndian.Uint32(b[1:])); n <= len(b) {
		return n
	}
	return 0
}

// lose cuts the connection. c.mu is held.
func (c *counted) lose() {
	c.lost = true
	_ = c.Conn.Close()
	if c.cutter.cut != nil {
		c.cutter.cut()
	}
}

func (c *counted) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.lost:
		return 0, io.ErrClosedPipe
	case !c.ready:
		return c.Conn.Write(b)
	}
	c.sent = append(c.sent, b...)
	pass := 0
	for {
		n := whole(c.sent[pass:])
		if n == 0 {
			break
		}
		c.commits = c.commits || bytes.Contains(bytes.ToLower(c.sent[pass:pass+n]), []byte("commit"))
		if c.cutter.count(c.commits) {
			_, _ = c.Conn.Write(c.sent[:pass])
			c.lose()
			return 0, io.ErrClosedPipe
		}
		pass += n
	}
	_, err := c.Conn.Write(c.sent[:pass])
	c.sent = append([]byte(nil), c.sent[pass:]...)
	return len(b), err
}

func (c *counted) Read(b []byte) (int, error) {
	buffer := make([]byte, 8<<10)
	for {
		c.mu.Lock()
		if len(c.out) > 0 {
			n := copy(b, c.out)
			c.out = c.out[n:]
			c.mu.Unlock()
			return n, nil
		}
		lost := c.lost
		c.mu.Unlock()
		if lost {
			return 0, io.EOF
		}
		n, err := c.Conn.Read(buffer)
		c.mu.Lock()
		c.got = append(c.got, buffer[:n]...)
		for n := whole(c.got); n > 0 && !c.lost; n = whole(c.got) {
			if c.ready && c.cutter.count(c.commits) {
				c.lose()
				break
			}
			c.ready = c.ready || c.got[0] == 'Z'
			c.commits = c.commits && c.got[0] != 'Z'
			c.out = append(c.out, c.got[:n]...)
			c.got = c.got[n:]
		}
		done := err != nil && len(c.out) == 0
		if c.lost && len(c.out) == 0 {
			err, done = io.EOF, true
		}
		c.mu.Unlock()
		if done {
			return 0, err
		}
	}
}
