package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/console"
)

const defaultListen = "127.0.0.1:8088"

// pageFlags say how the page is served.
type pageFlags struct {
	listen, zone string
	remote       bool
	limits       scopeLimits
	cfg          console.Config
}

func (a *app) serveCmd() *cobra.Command {
	var f pageFlags
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve the page",
		Long: `Serve serves the page to a browser: hot scopes, scopes with their usage against each limit, holds, leases and
operations. It only reads, and needs the reporting grants alone. To see River's jobs behind an operation, grant select
on river_job beside them.

It authenticates nobody. So it listens on the loopback interface, and answers only requests that name that, unless
--allow-remote says that something in front of it authenticates. To embed the page in a program, behind its own
authentication, see package console.

Limits are not in the database. The page draws scopes against those that --limit names, or that the viewer types.`,
		Example: `  metered serve
  metered serve --listen 127.0.0.1:0 --limit hourly=1000/1h --timezone Europe/Berlin
  metered serve --listen 127.0.0.1:0 --limit 'org/* 1000/1h' --limit 'wallet/* prepaid'`,
	}
	flags := c.Flags()
	flags.StringVar(&f.listen, "listen", defaultListen,
		"the address to serve at; port 0 is any that is free")
	flags.BoolVar(&f.remote, "allow-remote", false,
		"serve to other machines: only behind something that authenticates")
	flags.VarP(&f.limits, "limit", "l", limitsHelp+
		"; for some scopes alone, after the beginning of their names: 'org/* 1000/1h'")
	flags.StringVar(&f.zone, "timezone", "UTC",
		"the time zone of the times shown, as in Europe/Berlin")
	flags.StringVar(&f.cfg.RiverSchema, "river-schema", "",
		"where River's tables are; defaults to the search_path")
	flags.StringVar(&f.cfg.RiverUI, "river-ui", "", "the address of River UI, to link to")
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			return a.serve(ctx, pool, f, func(address string) error {
				if a.json {
					return a.print(map[string]string{"page": address})
				}
				_, err := fmt.Fprintf(a.out, "The page is at %s\n", address)
				return err
			})
		})
	})
}

// serve serves the page until ctx ends. It calls ready with its address.
func (a *app) serve(ctx context.Context, pool *pgxpool.Pool, f pageFlags,
	ready func(address string) error) error {
	place, err := time.LoadLocation(f.zone)
	if err != nil {
		return usagef("--timezone: %v", err)
	}
	f.cfg.Schema, f.cfg.Location = a.schema, place
	f.cfg.Logger = slog.New(slog.NewTextHandler(a.err, nil))
	if len(f.limits) > 0 {
		f.cfg.Limits = f.limits.of
	}
	page, err := console.New(pool, f.cfg)
	if err != nil {
		return usagef("%v", err)
	}
	listener, err := net.Listen("tcp", f.listen)
	if err != nil {
		return err
	}
	var handler http.Handler = page
	if !f.remote {
		if at, ok := listener.Addr().(*net.TCPAddr); !ok || !at.IP.IsLoopback() {
			return errors.Join(listener.Close(),
				usagef("--listen: %s is not of the loopback interface: other machines could read everything. See --allow-remote", f.listen))
		}
		handler = loopbackOnly(page)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second,
		ErrorLog: slog.NewLogLogger(f.cfg.Logger.Handler(), slog.LevelWarn)}
	server.RegisterOnShutdown(page.Close)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := ready("http://" + listener.Addr().String() + "/"); err != nil {
		return errors.Join(err, server.Close())
	}
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := server.Shutdown(closing); err != nil {
		return errors.Join(err, server.Close())
	}
	return found(exitDone)
}

// loopbackOnly refuses requests for another host: a foreign page whose name leads to this machine
// (DNS rebinding) could read this one.
func loopbackOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = strings.TrimSuffix(strings.TrimPrefix(r.Host, "["), "]") // IPv6 without a port
		}
		if ip := net.ParseIP(host); !strings.EqualFold(host, "localhost") &&
			(ip == nil || !ip.IsLoopback()) {
			http.Error(w, "this page is served to 127.0.0.1 and localhost",
				http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
