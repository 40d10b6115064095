package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/goredisstore.v9"
)

// peers by the name of their contender. fsync says which durability Redis was set
// to: always is that of Postgres, everysec what Redis advises.
var peers = []struct{ contender, name, meaning string }{
	{"metered", "peer_metered_charges", "charges/s of this library over 1,000 scopes, 8 clients"},
	{rateAlways, "peer_redis_rate_always", "go-redis/redis_rate, the same load, outside the transaction, " + asDurable},
	{rateSecond, "peer_redis_rate_everysec", "go-redis/redis_rate, the same load, outside the transaction, " + lessDurable},
	{throttledAlways, "peer_throttled_always", "throttled on go-redis, the same load, outside the transaction, " + asDurable},
	{throttledSecond, "peer_throttled_everysec", "throttled on go-redis, the same load, outside the transaction, " + lessDurable},
}

const (
	rateAlways, rateSecond           = "redis_rate, fsync always", "redis_rate, fsync everysec"
	throttledAlways, throttledSecond = "throttled, fsync always", "throttled, fsync everysec"

	asDurable   = "each answer on disk as with Postgres"
	lessDurable = "the last second may be lost"

	redisNote = "Redis cannot join the transaction: what it counted stays when the command rolls back, and a crash between " +
		"the two leaves them apart; GCRA spreads a rate evenly and keeps no entries, so no refund, receipt or exact window"
	redisFix = "redis-server is not on PATH. To have this row: apt-get install redis-server (Debian, Ubuntu), brew install redis (macOS)"
)

// peerFigures are a row each; River's part is that of enqueueing.
func peerFigures() []figure {
	var all []figure
	for i, p := range peers {
		all = append(all, figure{
			name: p.name, unit: "charges/s", meaning: p.meaning,
			measure: func(ctx context.Context, b *bench) (samples, error) {
				out, err := b.peers(ctx)
				s := samples{values: out.rates[p.contender]}
				switch {
				case i > 0 && s.values == nil:
					s.notRun = redisFix
				case i == 1:
					s.note = redisNote
				}
				return s, err
			},
		})
	}
	for _, p := range []struct{ contender, name, meaning string }{
		{"river", "peer_river_inserts", "River's InsertTx alone, in a transaction each, 8 clients"},
		{"keyless", "peer_metered_enqueues", "the library's Enqueue without a key, the same load"},
		{"keyed", "peer_metered_enqueues_keyed", "the library's Enqueue with a key, which River alone does not remember"},
	} {
		all = append(all, figure{
			name: p.name, unit: "jobs/s", meaning: p.meaning,
			measure: func(ctx context.Context, b *bench) (samples, error) {
				out, err := b.enqueues(ctx)
				if p.contender == "keyed" {
					b.chart(barsOf("Jobs, side by side", "jobs enqueued a second, 8 clients", "", out))
				}
				return samples{values: out.rates[p.contender]}, err
			},
		})
	}
	return all
}

func (b *bench) peers(ctx context.Context) (outcome, error) {
	return share(b, "peers", func() (outcome, error) {
		c := comparison{clients: 8, slice: b.slice(), rounds: b.pick(5, 3)}
		cons, drop, err := b.contenders(ctx, options{}, oneOf(1000), entry{"metered", chargeMetered}, entry{"floor", chargeFloor})
		if err != nil {
			return outcome{}, err
		}
		defer drop()
		cons[0].dissect = false
		c.contenders = cons
		text := redisFix
		if program, err := exec.LookPath("redis-server"); err == nil {
			r, err := startRedis(ctx, program)
			if err != nil {
				return outcome{}, err
			}
			defer r.stop()
			more, err := r.contenders(oneOf(1000))
			if err != nil {
				return outcome{}, err
			}
			c.contenders = append(c.contenders, more...)
			text = redisNote
		}
		out, err := c.run(ctx, b)
		b.chart(barsOf("Peers, side by side", "charges a second over 1,000 scopes, 8 clients, all on one machine", text+".", out))
		return out, err
	})
}

// barsOf draws a bar for each contender, with the spread of its rounds.
func barsOf(title, x, text string, o outcome) chart {
	c := chart{Title: title, X: x, Text: text}
	for _, name := range o.names {
		rates := o.rates[name]
		c.Bars = append(c.Bars, bar{name, median(rates), quantile(rates, 0), quantile(rates, 1), number(median(rates)) + "/s"})
	}
	return c
}

// redisServer is one of our own, reached by a socket in a directory of its own.
type redisServer struct {
	cmd    *exec.Cmd
	dir    string
	client *redis.Client
}

func startRedis(ctx context.Context, program string) (*redisServer, error) {
	dir, err := os.MkdirTemp("", "metered-redis-")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "s")
	r := &redisServer{dir: dir, cmd: exec.CommandContext(ctx, program,
		"--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--appendonly", "yes", "--appendfsync", "everysec",
		"--logfile", filepath.Join(dir, "log"))}
	endWithUs(r.cmd)
	if err := r.cmd.Start(); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	r.client = redis.NewClient(&redis.Options{Network: "unix", Addr: socket, PoolSize: 16})
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := r.client.Ping(ctx).Err()
		if err == nil {
			return r, nil
		}
		if time.Since(began) > 10*time.Second || ctx.Err() != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			r.stop()
			return nil, fmt.Errorf("redis-server does not answer: %w\n%s", err, log)
		}
	}
}

// stop ends the server, by force if it takes long.
func (r *redisServer) stop() {
	r.client.Close()
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(5*time.Second, func() { _ = r.cmd.Process.Kill() })
	_ = r.cmd.Wait()
	kill.Stop()
	os.RemoveAll(r.dir)
}

// sync sets the durability before a slice; there is no stock to run out of.
func (r *redisServer) sync(policy string) func(context.Context, int) (int, error) {
	return func(ctx context.Context, _ int) (int, error) {
		return math.MaxInt, r.client.ConfigSet(ctx, "appendfsync", policy).Err()
	}
}

// contenders allow everything, as the library's limits do in this comparison.
func (r *redisServer) contenders(scope func() string) ([]contender, error) {
	const much = 1_000_000_000
	rate := redis_rate.NewLimiter(r.client)
	limit := redis_rate.Limit{Rate: much, Burst: much, Period: time.Hour}
	byRate := func(ctx context.Context, _ int) error {
		res, err := rate.Allow(ctx, scope(), limit)
		if err == nil && res.Allowed == 0 {
			err = fmt.Errorf("redis_rate refused")
		}
		return err
	}
	store, err := goredisstore.NewCtx(r.client, "throttled:")
	if err != nil {
		return nil, err
	}
	gcra, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerHour(1_000_000), MaxBurst: 1_000_000})
	if err != nil {
		return nil, err
	}
	byThrottled := func(ctx context.Context, _ int) error {
		limited, _, err := gcra.RateLimitCtx(ctx, scope(), 1)
		if err == nil && limited {
			err = fmt.Errorf("throttled refused")
		}
		return err
	}
	return []contender{
		{name: rateAlways, op: byRate, stock: r.sync("always")},
		{name: rateSecond, op: byRate, stock: r.sync("everysec")},
		{name: throttledAlways, op: byThrottled, stock: r.sync("always")},
		{name: throttledSecond, op: byThrottled, stock: r.sync("everysec")},
	}, nil
}
