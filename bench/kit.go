package main

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
)

// kit is the base of contenders: a database of their own, with the library and River set up on it.
type kit struct {
	*site
	queue  *river.Client[pgx.Tx]
	client *metered.Client
	scope  func() string // of the next op

	minted []tokens.Minted
	spent  atomic.Int64 // of minted

	pools []*leases.Pool
}

// floorSeq is where those contenders take an entry's seq that keep no chain.
const floorSeq = `create sequence metered.bench_seq cache 32;`

func (b *bench) kit(ctx context.Context, o options, scope func() string) (*kit, error) {
	o.setUp = floorSeq + counterSQL + counterKeysSQL + o.setUp
	s, err := b.open(ctx, o)
	if err != nil {
		return nil, err
	}
	k := &kit{site: s, scope: scope}
	if err := k.setUp(&river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}}); err != nil {
		s.drop()
		return nil, err
	}
	return k, nil
}

func (k *kit) setUp(cfg *river.Config) (err error) {
	if k.queue, err = river.NewClient(riverpgxv5.New(k.Pool), cfg); err != nil {
		return err
	}
	// A hot scope's queue may be long, on a machine that is busy otherwise.
	k.client, err = metered.New(k.Pool, metered.Config{River: k.queue, Config: budget.Config{LockTimeout: time.Minute}})
	return err
}

// stockTokens mints until n tokens are unspent.
func (k *kit) stockTokens(ctx context.Context, n int) error {
	spent := min(int(k.spent.Load()), len(k.minted))
	k.minted = k.minted[spent:]
	k.spent.Store(0)
	for len(k.minted) < n {
		mint := tokens.Mint{Purpose: "work", Subject: "bench", TTL: 24 * time.Hour}
		mints := slices.Repeat([]tokens.Mint{mint}, min(n-len(k.minted), 1000))
		err := pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
			minted, err := k.client.Tokens.MintMany(ctx, tx, mints)
			k.minted = append(k.minted, minted...)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *kit) takeToken() (tokens.Minted, error) {
	i := int(k.spent.Add(1)) - 1
	if i >= len(k.minted) {
		return tokens.Minted{}, errOut
	}
	return k.minted[i], nil
}

// entry is a contender to be: its kit is opened for it.
type entry struct {
	name string
	make func(*kit) contender
}

// compare opens a kit for each entry, runs them in turns, and drops the kits.
func (b *bench) compare(ctx context.Context, c comparison, o options, scope func() string, entries ...entry) (outcome, error) {
	o.conns = cmp.Or(o.conns, c.clients)
	cons, drop, err := b.contenders(ctx, o, scope, entries...)
	if err != nil {
		return outcome{}, err
	}
	defer drop()
	c.contenders = cons
	return c.run(ctx, b)
}

func (b *bench) contenders(ctx context.Context, o options, scope func() string, entries ...entry) (cons []contender, drop func(), err error) {
	var kits []*kit
	drop = func() {
		for _, k := range kits {
			k.drop()
		}
	}
	for _, e := range entries {
		k, err := b.kit(ctx, o, scope)
		if err != nil {
			drop()
			return nil, nil, err
		}
		kits = append(kits, k)
		con := e.make(k)
		con.name, con.site = e.name, k.site
		cons = append(cons, con)
	}
	return cons, drop, nil
}

// on is a measure with a kit of its own.
func on(o options, scope func() string, measure func(context.Context, *bench, *kit) (samples, error)) func(context.Context, *bench) (samples, error) {
	return func(ctx context.Context, b *bench) (samples, error) {
		k, err := b.kit(ctx, o, scope)
		if err != nil {
			return samples{}, err
		}
		defer k.drop()
		return measure(ctx, b, k)
	}
}

// verified is an error if a scope's entries do not add up.
func (k *kit) verified(ctx context.Context, scope string) error {
	report, err := k.client.Budget.Verify(ctx, k.Pool, budget.VerifyOptions{Scope: scope})
	if err == nil && len(report.Differences) > 0 {
		err = fmt.Errorf("the ledger does not verify: %v", report.Differences[0])
	}
	return err
}

// does is a contender on the kit's database.
func (k *kit) does(name string, op func(context.Context) error) contender {
	return contender{name: name, site: k.site, op: func(ctx context.Context, _ int) error { return op(ctx) }}
}

// inTx is a contender whose op is a transaction.
func (k *kit) inTx(op func(context.Context, pgx.Tx) error) contender {
	return k.does("", func(ctx context.Context) error {
		return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error { return op(ctx, tx) })
	})
}

// spendingToken is inTx with a token that is to be spent.
func (k *kit) spendingToken(op func(context.Context, pgx.Tx, tokens.Minted) error) contender {
	c := k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		token, err := k.takeToken()
		if err != nil {
			return err
		}
		return op(ctx, tx, token)
	})
	c.stock = k.stockTokens
	return c
}

// concurrent is a comparison by so many clients.
func (b *bench) concurrent(clients int) comparison {
	return comparison{clients: clients, slice: b.slice(), rounds: b.rounds()}
}

// rates is a figure by 8 clients: the rate of the first contender by that of the second.
func rates(name string, g goal, meaning string, scope func() string, entries ...entry) figure {
	return ratio(name, g, meaning, entries[0].name, entries[1].name, func(b *bench, ctx context.Context) (outcome, error) {
		return b.compare(ctx, b.concurrent(8), options{}, scope, entries...)
	})
}

// ratio is a figure read from a comparison: the rate of contender one by that of other.
func ratio(name string, g goal, meaning, one, other string, compare func(*bench, context.Context) (outcome, error)) figure {
	return figure{name: name, unit: "times the rate", goal: g, meaning: meaning, measure: func(ctx context.Context, b *bench) (samples, error) {
		out, err := compare(b, ctx)
		return out.ratio(one, other), err
	}}
}

// cost is the time of one by that of other, by one client.
func (b *bench) cost(ctx context.Context, one, other contender) (samples, error) {
	out, err := b.sequential(one, other).run(ctx, b)
	return out.cost(one.name, other.name), err
}

// costs is a figure by one client: the time of the first contender by that of the second.
func costs(name string, g goal, meaning string, scope func() string, entries ...entry) figure {
	return figure{name: name, unit: "times the cost", goal: g, meaning: meaning, measure: func(ctx context.Context, b *bench) (samples, error) {
		out, err := b.compare(ctx, b.sequential(), options{}, scope, entries...)
		return out.cost(entries[0].name, entries[1].name), err
	}}
}

// oneOf returns scopes of 24 bytes, each as often as any other.
func oneOf(n int) func() string {
	return func() string { return scopeName(rand.IntN(n)) }
}

func scopeName(i int) string { return fmt.Sprintf("scope/%018d", i) }

func hotScope() string { return scopeName(0) }

// lockKey is the key of those contenders that lock a scope by themselves.
func lockKey(scope string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(scope))
	return int64(h.Sum64())
}

// window is long enough for all entries that a figure loads.
const window = 1000 * time.Hour

var roomy = []budget.Limit{{Max: 1 << 50, Window: window}}
