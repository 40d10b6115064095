package histories

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// client makes calls of all kinds until enough were made.
func (w *world) client(n int) {
	charged := map[string][]budget.Posted{} // that it may refund
	for w.ended.Load() < w.calls {
		failed := w.one(n, charged) != nil
		for failed && w.base.Ping(context.Background()) != nil {
			time.Sleep(10 * time.Millisecond) // the server restarts: not all calls are to meet that
		}
	}
}

func (w *world) one(n int, charged map[string][]budget.Posted) error {
	of := func(kind string) string { return fmt.Sprint(kind, "/", w.generation(), "/", rand.IntN(2)) }
	units := 1 + rand.Int64N(4)
	switch rand.IntN(13) {
	case 0, 1:
		c := call{thing: of("scope"), kind: "charge", amount: units, limit: 30}
		var entry budget.Posted
		err := w.tx(&w.cluster, n, c, func(ctx context.Context, tx pgx.Tx) error {
			r, err := w.c.Budget.Charge(ctx, tx, budget.Charge{Scope: c.thing, Amount: units, Limits: []budget.Limit{budget.Lifetime(c.limit)}})
			if err == nil {
				entry = r.Entries[0]
			}
			return err
		})
		if err == nil {
			charged[c.thing] = append(charged[c.thing], entry)
		}
		return err
	case 2:
		if len(charged) == 0 {
			return nil
		}
		scope := slices.Sorted(maps.Keys(charged))[rand.IntN(len(charged))]
		entry := charged[scope][0]
		if charged[scope] = charged[scope][1:]; len(charged[scope]) == 0 {
			delete(charged, scope)
		}
		return w.tx(&w.cluster, n, call{thing: scope, kind: "refund", amount: entry.Amount}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Budget.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: entry.Seq, Amount: entry.Amount})
			return err
		})
	case 3:
		c := call{thing: of([]string{"scope", "scope", "leased"}[rand.IntN(3)]), kind: "usage"}
		return w.record(n, c, "", func(ctx context.Context) (answer, error) {
			u, err := w.c.Budget.Usage(ctx, w.cut, budget.Query{Scope: c.thing})
			if err != nil {
				return answer{}, err
			}
			return answer{units: u[0].Used}, nil
		})
	case 4:
		c := call{thing: of("wallet"), kind: "charge", amount: units}
		return w.tx(&w.cluster, n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.wallets.Draw(ctx, tx, wallet.Draw{Wallet: c.thing, Amount: units})
			return err
		})
	case 5:
		c := call{thing: of("wallet"), kind: "credit", amount: units}
		if rand.IntN(2) == 0 {
			c.kind = "usage"
			return w.record(n, c, "", func(ctx context.Context) (answer, error) {
				b, err := w.wallets.Balance(ctx, w.cut, c.thing)
				return answer{units: -b.Units}, err
			})
		}
		return w.tx(&w.cluster, n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.wallets.Grant(ctx, tx, wallet.Grant{Wallet: c.thing, Amount: units, For: time.Duration(1+rand.IntN(3)) * time.Hour})
			return err
		})
	case 6:
		return w.hold(n, of("hold"))
	case 7:
		return w.claim(n, of("claim"))
	case 8, 9:
		return w.do(n, of("operation"))
	case 10:
		c := call{thing: of("token"), kind: "consume"}
		text, err := w.token(c.thing)
		if err != nil {
			return err
		}
		return w.tx(&w.cluster, n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Tokens.Consume(ctx, tx, "p", c.thing, text)
			return err
		})
	case 11:
		return w.child(n, of("child"))
	}
	c := call{thing: of("leased"), kind: "leased charge", amount: units, limit: 200}
	id := metered.NewID()
	return w.record(n, c, id, func(ctx context.Context) (answer, error) {
		_, err := metered.Do(ctx, w.leased, metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: c.thing, Amount: units, Limits: []budget.Limit{budget.Lifetime(c.limit)}}}},
			func(ctx context.Context, tx *metered.Tx) (int, error) {
				_, err := tx.Exec(ctx, insert, id)
				return 1, err
			})
		return answer{}, err
	})
}

// hold places a hold, ends it, or looks at it.
func (w *world) hold(n int, id string) error {
	c := call{thing: id, kind: []string{"place", "capture", "release", "look"}[rand.IntN(4)]}
	if c.kind == "look" {
		return w.record(n, c, "", func(ctx context.Context) (answer, error) {
			h, err := w.c.Holds.Get(ctx, w.cut, "", id, "")
			if errors.Is(err, holds.ErrUnknown) {
				return answer{}, nil
			}
			return answer{state: string(h.State)}, err
		})
	}
	return w.tx(&w.cluster, n, c, func(ctx context.Context, tx pgx.Tx) (err error) {
		switch c.kind {
		case "place":
			var h holds.Hold
			h, err = w.c.Holds.Place(ctx, tx, holds.Request{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "held " + id, Amount: 1}}})
			if err == nil && !h.Created {
				err = holds.ErrState // it was placed before
			}
		case "capture":
			_, err = w.c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{id}, All: true})
		default:
			_, err = w.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
		}
		return err
	})
}

// claim claims a key, or lets go of it.
func (w *world) claim(n int, value string) error {
	who := fmt.Sprint("client ", n)
	key := holds.Key{Type: "key", Value: value}
	if rand.IntN(2) == 0 {
		return w.tx(&w.cluster, n, call{thing: value, kind: "claim", who: who}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Holds.Claim(ctx, tx, holds.Claim{Key: key, Holder: who, TTL: time.Hour})
			return err
		})
	}
	return w.tx(&w.cluster, n, call{thing: value, kind: "let go", who: who}, func(ctx context.Context, tx pgx.Tx) error {
		list, err := w.c.Holds.List(ctx, tx, holds.Filter{Claim: key, Holder: who, State: holds.Held})
		if err != nil {
			return err
		}
		if len(list.Holds) == 0 {
			return holds.ErrUnknown
		}
		_, err = w.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{list.Holds[0].ID}})
		return err
	})
}

// do runs a command. Its result is the value of the attempt that ran.
func (w *world) do(n int, of string) error {
	value := metered.NewID()
	return w.record(n, call{thing: of, kind: "do", who: value}, value, func(ctx context.Context) (answer, error) {
		cmd := metered.Command{ID: of, Input: 1, EarlyRelease: rand.IntN(3) == 0, LSN: rand.IntN(5) == 0}
		out, err := metered.Do(ctx, w.c, cmd, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Exec(ctx, insert, value)
			return value, err
		})
		return answer{state: out.Result}, err
	})
}

// token is the token of a name, which the first call mints.
func (w *world) token(name string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if text := w.tokens[name]; text != "" {
		return text, nil
	}
	err := pgx.BeginFunc(context.Background(), w.pool, func(tx pgx.Tx) error {
		minted, err := w.c.Tokens.Mint(context.Background(), tx, tokens.Mint{Purpose: "p", Subject: name})
		if err == nil {
			w.tokens[name] = minted.Token.Reveal()
		}
		return err
	})
	if err != nil {
		delete(w.tokens, name) // nobody has presented it
	}
	return w.tokens[name], err
}
