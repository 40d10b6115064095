package pgtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Wire sits between a pool and its server and reads enough of the protocol to know the SQL of a
// flush. A flush is everything that the client sends before it waits: up to a Sync or a simple
// query.
type Wire struct {
	mu      sync.Mutex
	on      func(f *Flush)
	refused bool // new connections fail
	flushes []*Flush
	Slow    atomic.Int64 // nanoseconds that each write takes longer
}

// Flush is a client's flush, and its treatment.
type Flush struct {
	SQL  []string // executed or prepared, in order
	asks bool     // by a Sync or a simple query: not the start or end of a session
	Conn *Tapped
	Raw  []byte

	Deliver func() // sends it to the server, with the test's acts around it. Nil: just sends it
}

// Has reports whether one of the statements contains text.
func (f *Flush) Has(text string) bool {
	return slices.ContainsFunc(f.SQL, func(sql string) bool { return strings.Contains(sql, text) })
}

// Last reports whether it is the last flush of a command.
func (f *Flush) Last() bool { return f.Has("complete_command") && f.Has("commit") }

// Tap returns a pool on the same database that runs through a wire.
func Tap(t testing.TB, pool *pgxpool.Pool, change func(*pgxpool.Config)) (*pgxpool.Pool, *Wire) {
	t.Helper()
	if pool.Config().ConnConfig.TLSConfig != nil {
		t.Skip("the wire cannot be read through TLS")
	}
	w := &Wire{}
	return Reopen(t, pool, func(c *pgxpool.Config) {
		c.ShouldPing = noPing
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			w.mu.Lock()
			refused := w.refused
			w.mu.Unlock()
			if refused {
				return nil, io.ErrClosedPipe
			}
			conn, err := dial(ctx, network, addr)
			return &Tapped{Conn: conn, wire: w, names: map[string]string{}, portals: map[string]string{}}, err
		}
		if change != nil {
			change(c)
		}
	}), w
}

// noPing keeps a pool from asking a connection that was idle for a second whether it lives: one
// flush more, when the machine is busy.
func noPing(context.Context, pgxpool.ShouldPingParams) bool { return false }

// Each calls f with each flush from now on, before it is sent.
func (w *Wire) Each(f func(*Flush)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on, w.flushes = f, nil
}

// Once calls f with the first flush that is picked, and no other.
func (w *Wire) Once(pick func(*Flush) bool, f func(*Flush)) {
	var one sync.Once
	w.Each(func(x *Flush) {
		if pick(x) {
			one.Do(func() { f(x) })
		}
	})
}

// Refuse says whether new connections fail.
func (w *Wire) Refuse(yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = yes
}

// Sent returns the flushes since Each was called.
func (w *Wire) Sent() []*Flush {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.flushes)
}

// Tapped is a connection that runs through a wire.
type Tapped struct {
	net.Conn
	wire    *Wire
	started bool
	pending []byte
	names   map[string]string // of prepared statements: their text
	portals map[string]string

	pid       atomic.Int32 // of the backend
	answering sync.Mutex   // held while a flush is being dealt with
	Answer    []byte       // to be read before the server's messages
	cut       bool
	reading   sync.Mutex   // held while Conn is read
	taken     atomic.Int64 // grows when the client's waiting changes
}

func (c *Tapped) Write(b []byte) (int, error) {
	defer func() { time.Sleep(time.Duration(c.wire.Slow.Load())) }()
	c.answering.Lock()
	defer c.answering.Unlock()
	c.pending = append(c.pending, b...)
	for {
		f := c.next()
		if f == nil {
			return len(b), nil
		}
		c.wire.mu.Lock()
		c.wire.flushes = append(c.wire.flushes, f)
		on := c.wire.on
		c.wire.mu.Unlock()
		if on != nil && f.asks {
			on(f)
		}
		if f.Deliver != nil {
			f.Deliver()
			return len(b), nil
		}
		if err := f.Pass(); err != nil {
			return 0, err
		}
	}
}

func (c *Tapped) Read(b []byte) (int, error) {
	for {
		c.answering.Lock()
		if len(c.Answer) > 0 {
			n := copy(b, c.Answer)
			c.Answer = c.Answer[n:]
			c.answering.Unlock()
			return n, nil
		}
		cut, taken := c.cut, c.taken.Load()
		c.answering.Unlock()
		if cut {
			return 0, io.EOF
		}
		c.reading.Lock()
		if c.taken.Load() != taken {
			c.reading.Unlock()
			continue
		}
		n, err := c.Conn.Read(b)
		c.reading.Unlock()
		if n == 0 && err != nil && c.taken.Load() != taken {
			continue
		}
		if i := bytes.Index(b[:n], []byte("K\x00\x00\x00\x0c")); i >= 0 && i+9 <= n && c.pid.Load() == 0 { // BackendKeyData
			c.pid.Store(int32(binary.BigEndian.Uint32(b[i+5:])))
		}
		return n, err
	}
}

// take keeps the client from reading until give is called. When a write takes long pgx reads
// in the background, and may still be waiting for more than the last answer.
func (c *Tapped) take() (give func()) {
	c.taken.Add(1)
	for !c.reading.TryLock() { // pgx sets deadlines, too, and takes them back
		_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
		time.Sleep(100 * time.Microsecond)
	}
	_ = c.Conn.SetReadDeadline(time.Now().Add(time.Minute)) // the machine may be busy
	return func() {
		_ = c.Conn.SetReadDeadline(time.Time{})
		c.reading.Unlock()
	}
}

// next takes a flush from the pending bytes.
func (c *Tapped) next() *Flush {
	f := &Flush{Conn: c}
	rest := c.pending
	for {
		head := 1
		if !c.started {
			head = 0
		}
		if len(rest) < head+4 {
			return nil
		}
		size := head + int(binary.BigEndian.Uint32(rest[head:]))
		if len(rest) < size {
			return nil
		}
		message := rest[:size]
		rest = rest[size:]
		if !c.started || c.read(f, message) {
			c.started = true
			f.Raw, c.pending = slices.Clone(c.pending[:len(c.pending)-len(rest)]), slices.Clone(rest)
			return f
		}
	}
}

// read notes one message. true ends the flush.
func (c *Tapped) read(f *Flush, message []byte) bool {
	text := func(i int) string { // the i-th zero-terminated string
		return string(bytes.SplitN(message[5:], []byte{0}, i+2)[i])
	}
	switch message[0] {
	case 'Q':
		f.SQL, f.asks = append(f.SQL, text(0)), true
		return true
	case 'P':
		c.names[text(0)] = text(1)
	case 'B':
		c.portals[text(0)] = c.names[text(1)]
	case 'E':
		f.SQL = append(f.SQL, c.portals[text(0)])
	case 'S':
		f.asks = true
		return true
	case 'p', 'X', 'H':
		return true
	}
	return false
}

// Pass sends the flush to the server.
func (f *Flush) Pass() error {
	_, err := f.Conn.Conn.Write(f.Raw)
	return err
}

// Ask sends the flush and reads the server's answer, up to ReadyForQuery.
func (f *Flush) Ask() []byte {
	defer f.Conn.take()()
	var all []byte
	if f.Pass() != nil {
		return all
	}
	for {
		head := make([]byte, 5)
		if _, err := io.ReadFull(f.Conn.Conn, head); err != nil {
			return all
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(f.Conn.Conn, body); err != nil {
			return all
		}
		all = append(append(all, head...), body...)
		if head[0] == 'Z' {
			return all
		}
	}
}

// Close drops the connection.
func (f *Flush) Close() {
	f.Conn.cut = true
	f.Conn.taken.Add(1)
	_ = f.Conn.Conn.Close()
}

// Lose drops the flush and the connection.
func (f *Flush) Lose() { f.Deliver = f.Close }

// LoseAnswer sends the flush and drops the connection when the server has dealt
// with it.
func (f *Flush) LoseAnswer() { f.AnswerWith(nil) }

// AnswerWith is LoseAnswer with another answer in front.
func (f *Flush) AnswerWith(answer []byte) {
	f.Deliver = func() {
		f.Ask()
		f.Conn.Answer = answer
		f.Close()
	}
}

// AnswerInDoubt answers the flush, a COMMIT, by an ERROR and ReadyForQuery, after the server
// carried it out or never saw it. The connection ends after that.
func (f *Flush) AnswerInDoubt(code string, committed bool) {
	f.Deliver = func() {
		if committed {
			f.Ask()
		}
		f.Close()
		f.Conn.Answer = append(ErrorResponse("ERROR", code, "no"), 'Z', 0, 0, 0, 5, 'I')
	}
}

// ErrorResponse is a message of the server's.
func ErrorResponse(severity, code, text string) []byte {
	body := []byte("S" + severity + "\x00V" + severity + "\x00C" + code + "\x00M" + text + "\x00\x00")
	return append(binary.BigEndian.AppendUint32([]byte{'E'}, uint32(len(body)+4)), body...)
}

// Terminate kills the backend of the flush and waits until it has gone.
func (f *Flush) Terminate(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	ctx, cancel := Patient(t)
	defer cancel()
	if _, err := pool.Exec(ctx, "select pg_terminate_backend($1, 100000)", f.PID()); err != nil {
		t.Errorf("pgtest: ending a backend: %v", err)
	}
}

// PID is the process of the backend that the flush is sent to.
func (f *Flush) PID() int32 { return f.Conn.pid.Load() }
