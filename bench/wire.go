package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/jackc/pgx/v5"
)

// turns is a relay between a client and the server that counts round trips: how
// often the client speaks after the server has.
type turns struct {
	listener net.Listener

	mu            sync.Mutex
	n             int
	serverWasLast bool
}

func startTurns(connString string) (*turns, error) {
	cfg, err := pgx.ParseConfig(connString)
	if err != nil {
		return nil, err
	}
	network, address := "tcp", fmt.Sprintf("%s:%d", cfg.Host, cfg.Port)
	if cfg.Host[0] == '/' {
		network, address = "unix", fmt.Sprintf("%s/.s.PGSQL.%d", cfg.Host, cfg.Port)
	}
	t := &turns{}
	if t.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	go func() {
		for {
			client, err := t.listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial(network, address)
			if err != nil {
				client.Close()
				continue
			}
			go t.relay(server, client, false)
			go t.relay(client, server, true)
		}
	}()
	return t, nil
}

func (t *turns) relay(to, from net.Conn, fromServer bool) {
	defer to.Close()
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			t.mu.Lock()
			if !fromServer && t.serverWasLast {
				t.n++
			}
			t.serverWasLast = fromServer
			t.mu.Unlock()
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			_, _ = io.Copy(io.Discard, from)
			return
		}
	}
}

// take returns the round trips since the last call.
func (t *turns) take() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.n
	t.n = 0
	return n
}

// dial is a pgconn.DialFunc that goes through the relay, whatever the address.
func (t *turns) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", t.listener.Addr().String())
}
