package main

import (
	"context"
	"net"
	"sync"
	"time"
)

const maxPending = 4096 // chunks on their way

// proxy relays connections by TCP on the loopback and lets every byte arrive half a round trip
// after it was sent, in both directions.
//
// One goroutine delivers everything: the delay is the same for all chunks, so the first to come is
// the first due.
type proxy struct {
	listener net.Listener // its own dial is the only one that connects to it
	oneWay   time.Duration
	pending  chan chunk
	reads    sync.WaitGroup
}

// chunk is the bytes of one read. Without bytes it is the end of the stream.
type chunk struct {
	to    net.Conn
	bytes []byte
	due   time.Time
}

func startProxy(roundTrip time.Duration) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: l, oneWay: roundTrip / 2, pending: make(chan chunk, maxPending)}
	go p.deliver()
	return p, nil
}

// dial is a DialFunc that goes through the proxy.
func (p *proxy) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	server, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	client, err := d.DialContext(ctx, "tcp", p.listener.Addr().String())
	if err != nil {
		server.Close()
		return nil, err
	}
	// Of two that dial at once either may get the other's: the servers' sides are alike.
	relay, err := p.listener.Accept()
	if err != nil {
		server.Close()
		client.Close()
		return nil, err
	}
	p.reads.Go(func() { p.read(relay, server) })
	p.reads.Go(func() { p.read(server, relay) })
	return client, nil
}

// close waits until the connections are closed.
func (p *proxy) close() {
	p.listener.Close()
	p.reads.Wait()
	close(p.pending)
}

// read queues the bytes of one side. A full queue stops it reading.
func (p *proxy) read(from, to net.Conn) {
	for {
		buf := make([]byte, 16<<10)
		n, err := from.Read(buf)
		due := time.Now().Add(p.oneWay)
		if n > 0 {
			p.pending <- chunk{to, buf[:n], due}
		}
		if err != nil {
			p.pending <- chunk{to, nil, due}
			return
		}
	}
}

func (p *proxy) deliver() {
	exactSleeps()
	for c := range p.pending {
		for wait := time.Until(c.due); wait > 0; wait = time.Until(c.due) {
			sleep(wait)
		}
		if c.bytes == nil {
			c.to.Close()
			continue
		}
		// A peer that does not read must not hold up the others for long.
		_ = c.to.SetWriteDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.to.Write(c.bytes); err != nil {
			c.to.Close()
		}
	}
}
