package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const maxPending = 4096 // chunks on their way

// proxy relays TCP connections on the loopback and lets every byte arrive half a round trip after it was sent, in
// both directions.
//
// One goroutine delivers everything: the delay is the same for all chunks, so the first to come is the first due.
type proxy struct {
	listener net.Listener
	network  string
	address  string
	oneWay   time.Duration
	pending  chan chunk
	done     chan struct{}

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil once closed
}

// chunk is the bytes of one read. Without bytes it is the end of the stream.
type chunk struct {
	to    net.Conn
	bytes []byte
	due   time.Time
}

// startProxy listens on a port of its own, in front of the server of connString.
func startProxy(connString string, roundTrip time.Duration) (*proxy, error) {
	cfg, err := pgx.ParseConfig(connString)
	if err != nil {
		return nil, err
	}
	network, address := "tcp", net.JoinHostPort(cfg.Host, fmt.Sprint(cfg.Port))
	if cfg.Host[0] == '/' {
		network, address = "unix", fmt.Sprintf("%s/.s.PGSQL.%d", cfg.Host, cfg.Port)
	}
	return proxyTo(network, address, roundTrip)
}

func proxyTo(network, address string, roundTrip time.Duration) (p *proxy, err error) {
	p = &proxy{
		network: network, address: address, oneWay: roundTrip / 2,
		pending: make(chan chunk, maxPending), done: make(chan struct{}), conns: map[net.Conn]struct{}{},
	}
	if p.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	go p.accept()
	go p.deliver()
	return p, nil
}

// dial is a DialFunc that goes through the proxy to any address.
func (p *proxy) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", p.listener.Addr().String())
}

func (p *proxy) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		return
	}
	p.listener.Close()
	for c := range p.conns {
		c.Close()
	}
	p.conns = nil
	close(p.done)
}

// keep notes connections for close. It returns false if it is too late.
func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.conns == nil {
			c.Close()
			continue
		}
		p.conns[c] = struct{}{}
	}
	return p.conns != nil
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(p.network, p.address)
		if err != nil {
			client.Close()
			continue
		}
		if !p.keep(client, server) {
			return
		}
		go p.read(client, server)
		go p.read(server, client)
	}
}

// read queues the bytes of one side. A full queue stops it reading.
func (p *proxy) read(from, to net.Conn) {
	for {
		buf := make([]byte, 16<<10)
		n, err := from.Read(buf)
		due := time.Now().Add(p.oneWay)
		if n > 0 && !p.queue(chunk{to, buf[:n], due}) {
			return
		}
		if err != nil {
			p.queue(chunk{to, nil, due})
			return
		}
	}
}

func (p *proxy) queue(c chunk) bool {
	select {
	case p.pending <- c:
		return true
	case <-p.done:
		return false
	}
}

func (p *proxy) deliver() {
	exactSleeps()
	for {
		var c chunk
		select {
		case c = <-p.pending:
		case <-p.done:
			return
		}
		for wait := time.Until(c.due); wait > 0; wait = time.Until(c.due) {
			sleep(wait)
		}
		if c.bytes == nil {
			p.forget(c.to)
			continue
		}
		// A peer that does not read must not hold up the others for long.
		_ = c.to.SetWriteDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.to.Write(c.bytes); err != nil {
			p.forget(c.to)
		}
	}
}

func (p *proxy) forget(c net.Conn) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}
