package metered_test

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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// wire sits between a pool and its server and understands enough of the protocol
// to know what a flush asks for. A flush is what the client sends before it waits:
// up to a Sync or a simple query.
type wire struct {
	mu      sync.Mutex
	on      func(f *flush)
	refused bool // new connections fail
	flushes []*flush
	slow    atomic.Int64 // nanoseconds that each write takes longer
}

// flush is what was sent, and what is to become of it.
type flush struct {
	SQL  []string // of what it executes or prepares, in order
	asks bool     // by a Sync or a simple query: not the start or end of a session
	conn *tapped
	raw  []byte

	deliver func() // to the server, and what happens then; nil: just that
}

// has reports whether one of the statements contains text.
func (f *flush) has(text string) bool {
	return slices.ContainsFunc(f.SQL, func(sql string) bool { return strings.Contains(sql, text) })
}

// last reports whether it is the last flush of a command.
func (f *flush) last() bool { return f.has("complete_command") && f.has("commit") }

// tap returns a pool on the same database that runs through a wire.
func tap(t *testing.T, pool *pgxpool.Pool, change func(*pgxpool.Config)) (*pgxpool.Pool, *wire) {
	t.Helper()
	if pool.Config().ConnConfig.TLSConfig != nil {
		t.Skip("the wire cannot be read through TLS")
	}
	w := &wire{}
	return reopen(t, pool, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			w.mu.Lock()
			refused := w.refused
			w.mu.Unlock()
			if refused {
				return nil, io.ErrClosedPipe
			}
			conn, err := dial(ctx, network, addr)
			return &tapped{Conn: conn, wire: w, names: map[string]string{}, portals: map[string]string{}}, err
		}
		if change != nil {
			change(c)
		}
	}), w
}

// each calls f with each flush from now on, before it is sent.
func (w *wire) each(f func(*flush)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.on, w.flushes = f, nil
}

// once calls f with the first flush that is picked, and no other.
func (w *wire) once(pick func(*flush) bool, f func(*flush)) {
	var one sync.Once
	w.each(func(x *flush) {
		if pick(x) {
			one.Do(func() { f(x) })
		}
	})
}

func (w *wire) refuse(yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = yes
}

// sent returns the flushes since each was called.
func (w *wire) sent() []*flush {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.flushes)
}

type tapped struct {
	net.Conn
	wire    *wire
	started bool
	pending []byte
	names   map[string]string // of prepared statements: their text
	portals map[string]string

	pid       atomic.Int32 // of the backend
	answering sync.Mutex   // held while a flush is being dealt with
	answer    []byte       // to be read before what the server sends
	cut       bool
	reading   sync.Mutex   // held while Conn is read
	taken     atomic.Int64 // grows when what the client waits for changes
}

func (c *tapped) Write(b []byte) (int, error) {
	defer func() { time.Sleep(time.Duration(c.wire.slow.Load())) }()
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
		if f.deliver != nil {
			f.deliver()
			return len(b), nil
		}
		if err := f.pass(); err != nil {
			return 0, err
		}
	}
}

func (c *tapped) Read(b []byte) (int, error) {
	for {
		c.answering.Lock()
		if len(c.answer) > 0 {
			n := copy(b, c.answer)
			c.answer = c.answer[n:]
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
func (c *tapped) take() (give func()) {
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

// next takes a flush from what is pending.
func (c *tapped) next() *flush {
	f := &flush{conn: c}
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
			f.raw, c.pending = slices.Clone(c.pending[:len(c.pending)-len(rest)]), slices.Clone(rest)
			return f
		}
	}
}

// read takes note of one message; true ends the flush.
func (c *tapped) read(f *flush, message []byte) bool {
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

func (f *flush) pass() error {
	_, err := f.conn.Conn.Write(f.raw)
	return err
}

// ask sends the flush and reads what the server says to it, up to ReadyForQuery.
func (f *flush) ask() []byte {
	defer f.conn.take()()
	var all []byte
	if f.pass() != nil {
		return all
	}
	for {
		head := make([]byte, 5)
		if _, err := io.ReadFull(f.conn.Conn, head); err != nil {
			return all
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(f.conn.Conn, body); err != nil {
			return all
		}
		all = append(append(all, head...), body...)
		if head[0] == 'Z' {
			return all
		}
	}
}

func (f *flush) close() {
	f.conn.cut = true
	f.conn.taken.Add(1)
	_ = f.conn.Conn.Close()
}

// lose drops the flush and the connection.
func (f *flush) lose() { f.deliver = f.close }

// loseAnswer sends the flush and drops the connection when the server has dealt
// with it.
func (f *flush) loseAnswer() { f.answerWith(nil) }

// answerWith is loseAnswer with another answer in front.
func (f *flush) answerWith(answer []byte) {
	f.deliver = func() {
		f.ask()
		f.conn.answer = answer
		f.close()
	}
}

// errorResponse is a message of the server's.
func errorResponse(severity, code, text string) []byte {
	body := []byte("S" + severity + "\x00V" + severity + "\x00C" + code + "\x00M" + text + "\x00\x00")
	return append(binary.BigEndian.AppendUint32([]byte{'E'}, uint32(len(body)+4)), body...)
}

func TestWire_ReadsWhatIsExecuted(t *testing.T) {
	t.Parallel()
	pool, w := tap(t, setUpPool(t), nil)
	for range 2 {
		w.each(nil)
		_, err := pool.Exec(t.Context(), "insert into uploads values ($1) on conflict do nothing", "x")
		require.NoError(t, err)
	}
	sent := w.sent()
	require.Len(t, sent, 1)
	require.Equal(t, []string{"insert into uploads values ($1) on conflict do nothing"}, sent[0].SQL)
}

// With slow writes pgx reads in the background, and is at it when the next flush is sent.
func TestWire_HasTheAnswerAlsoWhilePgxReads(t *testing.T) {
	t.Parallel()
	pool, w := tap(t, setUpPool(t), nil)
	w.slow.Store(int64(30 * time.Millisecond))
	_, err := pool.Exec(t.Context(), "select 1")
	require.NoError(t, err)
	var answers []byte
	w.once(func(f *flush) bool { return f.has("select 2") }, func(f *flush) {
		f.deliver = func() {
			answers = f.ask()
			f.conn.answer = answers
		}
	})
	_, err = pool.Exec(t.Context(), "select 2", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	require.Contains(t, string(answers), "SELECT 1\x00")
}
