package main

import (
	"crypto/rand"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echo is a server that sends back the bytes it receives.
func echo(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l
}

func through(t *testing.T, l net.Listener, roundTrip time.Duration) net.Conn {
	p, err := startProxy(roundTrip)
	require.NoError(t, err)
	t.Cleanup(p.close)
	c, err := p.dial(t.Context(), "tcp", l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func TestProxy_RelaysEveryByteInOrder(t *testing.T) {
	t.Parallel()
	c := through(t, echo(t), time.Millisecond)
	sent := make([]byte, 1<<20)
	_, _ = rand.Read(sent)
	go func() { _, _ = c.Write(sent) }()
	got := make([]byte, len(sent))
	_, err := io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, sent, got)
}

// However busy the machine is, round trips one after the other take no less.
func TestProxy_DelaysEachRoundTripByNoLessThanIsSet(t *testing.T) {
	t.Parallel()
	const trips, each = 10, 20 * time.Millisecond
	c := through(t, echo(t), each)
	began := time.Now()
	for range trips {
		_, err := c.Write([]byte{1})
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		require.NoError(t, err)
	}
	require.GreaterOrEqual(t, time.Since(began), trips*each)
}
