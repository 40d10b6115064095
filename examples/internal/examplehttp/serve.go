// Package examplehttp serves an example over HTTP, and is its client.
package examplehttp

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Serve serves until ctx is done, and then finishes its requests. It returns the address, and a channel that gets the
// error of its end.
func Serve(ctx context.Context, address string, server *http.Server) (base string, closed <-chan error, err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", nil, err
	}
	done := make(chan error, 2)
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			done <- err
		}
	}()
	context.AfterFunc(ctx, func() {
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err := server.Shutdown(stopping)
		if err != nil { // some requests go on
			err = errors.Join(err, server.Close())
		}
		done <- err
	})
	return "http://" + listener.Addr().String(), done, nil
}

// Run serves at an address until ctx is done, and calls announce with it. Without an address it serves on loopback
// until the demonstration, show, has ended.
func Run(ctx context.Context, address string, handler http.Handler, announce func(base string), show func(ctx context.Context, base string) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	base, closed, err := Serve(ctx, cmp.Or(address, "127.0.0.1:0"), &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second})
	if err != nil {
		return err
	}
	if address != "" {
		announce(base)
		return <-closed
	}
	err = show(ctx, base)
	cancel()
	return errors.Join(err, <-closed)
}
