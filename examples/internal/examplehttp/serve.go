// Package examplehttp serves an example over HTTP.
package examplehttp

import (
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
