package main

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/wallet"
)

// Postgres cleans up no row that an open snapshot may still see. A row that is updated in place
// gets slower with each of its versions, until the snapshot ends: an idle transaction, a long
// report, a standby that is stuck.
var snapshotFigures = []figure{
	besideSnapshot("hot_under_open_snapshot_vs_start", atLeast(0.95), "charge", "charge"+fresh, "direct charges"),
	besideSnapshot("hot_under_open_snapshot_vs_counter_row", atLeast(3), "charge", "counter", "direct charges against a counter by hand, both"),
	besideSnapshot("counter_under_open_snapshot_vs_start", goal{}, "counter", "counter"+fresh, "the counter by hand"),
	besideSnapshot("hold_under_open_snapshot_vs_start", atLeast(0.8), "hold", "hold"+fresh, "holds, placed and captured"),
	besideSnapshot("token_under_open_snapshot_vs_start", atLeast(0.8), "token", "token"+fresh, "tokens, minted before"),
	besideSnapshot("lease_under_open_snapshot_vs_start", atLeast(0.8), "lease", "lease"+fresh, "charges from leases"),
	besideSnapshot("key_under_open_snapshot_vs_start", atLeast(0.8), "key", "key"+fresh, "enqueueing with a key"),
	besideSnapshot("wallet_under_open_snapshot_vs_start", atLeast(0.8), "wallet", "wallet"+fresh, "draws from a wallet with one lot"),
}

const fresh = " at its start"

func besideSnapshot(name string, g goal, one, other, things string) figure {
	return ratio(name, g, things+", one scope, 4 clients, when another session has kept a snapshot open for a while", one, other, func(b *bench, ctx context.Context) (outcome, error) {
		if one == "charge" || one == "counter" {
			return b.besideSnapshot(ctx, "charges", entry{"charge", chargeMetered}, entry{"counter", chargeCounter})
		}
		return b.besideSnapshot(ctx, "others", entry{"hold", placeAndCapture}, entry{"token", tokenConsume}, entry{"lease", chargeLeased}, entry{"key", enqueue(true)}, entry{"wallet", drawHot})
	})
}

// besideSnapshot has each contender work beside an open snapshot for a while, and then against one
// of its kind that begins, in a database without one.
func (b *bench) besideSnapshot(ctx context.Context, name string, entries ...entry) (outcome, error) {
	return share(b, "open snapshot: "+name, func() (outcome, error) {
		n := len(entries)
		for _, e := range entries {
			entries = append(entries, entry{e.name + fresh, e.make})
		}
		all, drop, err := b.contenders(ctx, options{conns: 4}, hotScope, entries...)
		if err != nil {
			return outcome{}, err
		}
		defer drop()
		for _, con := range all[:n] {
			conn, err := pgx.Connect(ctx, con.site.url)
			if err != nil {
				return outcome{}, err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			if _, err = conn.Exec(ctx, "begin isolation level repeatable read; select 1 from metered.schema_version"); err != nil {
				return outcome{}, err
			}
		}
		c := comparison{contenders: all[:n], clients: 4, slice: b.slice(), rounds: math.MaxInt32, length: time.Duration(n) * b.openFor}
		out, err := c.run(ctx, b)
		if err == nil && b.plot != "" && name == "charges" {
			err = plotFile(b.plot, "One scope, four clients, beside an open snapshot", b.openFor, []series{
				{"charges", "#2a9d6f", out.rates["charge"]}, {"a counter row", "#d9643a", out.rates["counter"]}})
		}
		if err != nil {
			return out, err
		}
		c.contenders, c.rounds, c.length = all, b.rounds(), 0
		return c.run(ctx, b)
	})
}

// drawHot draws from a wallet with one lot.
func drawHot(k *kit) contender {
	book, err := wallet.New(k.client.Budget, wallet.Config{})
	if err == nil {
		err = pgx.BeginFunc(context.Background(), k.Pool, func(tx pgx.Tx) error {
			_, err := book.Grant(context.Background(), tx, wallet.Grant{Wallet: k.scope(), Amount: 1 << 40, Ends: wallet.After(30 * 24 * time.Hour)})
			return err
		})
	}
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		if err != nil {
			return err
		}
		_, err := k.client.Budget.Charge(ctx, tx, book.Charge(k.scope(), 1))
		return err
	})
}
