package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// entry is a charge that can be refunded.
type entry struct{ amount, seq int64 }

// client makes calls of all kinds until enough were made.
func (w *world) client(n int) {
	charged := map[string][]entry{}
	for w.more() {
		went := w.one(n, charged)
		for !went && w.base.Ping(context.Background()) != nil {
			time.Sleep(10 * time.Millisecond) // the server restarts: not all calls are to meet that
		}
	}
}

// one makes a call, and reports whether it went well.
func (w *world) one(n int, charged map[string][]entry) bool {
	of := func(kind string) string {
		return fmt.Sprint(kind, "/", w.generation(), "/", pgtest.Random(w.T).IntN(2))
	}
	c := call{ID: metered.NewID(), Amount: 1 + pgtest.Random(w.T).Int64N(4)}
	perform := w.program(n)
	switch pgtest.Random(w.T).IntN(14) {
	case 0, 1:
		c.Thing, c.Kind, c.Limit = of("scope"), []string{"charge", "command"}[pgtest.Random(w.T).IntN(2)], 30
		r := w.record(n, c, perform)
		if r.Outcome == done {
			charged[c.Thing] = append(charged[c.Thing], entry{c.Amount, r.Seq})
		}
		return r.Outcome == done
	case 2:
		if len(charged) == 0 {
			return true
		}
		c.Thing, c.Kind = slices.Sorted(maps.Keys(charged))[pgtest.Random(w.T).IntN(len(charged))], "refund"
		c.Amount, c.Seq = charged[c.Thing][0].amount, charged[c.Thing][0].seq
		if charged[c.Thing] = charged[c.Thing][1:]; len(charged[c.Thing]) == 0 {
			delete(charged, c.Thing)
		}
	case 3:
		c.Thing, c.Kind = of([]string{"scope", "scope", "leased", "session"}[pgtest.Random(w.T).IntN(4)]), "usage"
	case 4:
		c.Thing, c.Kind = of("wallet"), "charge"
	case 5:
		c.Thing, c.Kind = of("wallet"), []string{"credit", "usage"}[pgtest.Random(w.T).IntN(2)]
	case 6:
		c.Thing, c.Kind = of("hold"), []string{"place", "capture", "release", "look"}[pgtest.Random(w.T).IntN(4)]
	case 7:
		c.Thing, c.Kind, c.Who = of("claim"), []string{"claim", "let go"}[pgtest.Random(w.T).IntN(2)], fmt.Sprint("client ", n)
	case 8, 9:
		c.Thing, c.Kind, c.Who = of("operation"), "do", c.ID
	case 10:
		c.Thing, c.Kind = of("token"), []string{"consume", "redeem"}[pgtest.Random(w.T).IntN(2)]
		if c.Token = w.token(c.Thing, perform); c.Token == "" {
			return false
		}
	case 11:
		return w.child(n, of("child"))
	case 12:
		c.Thing, c.Kind, c.Limit = of("session"), "session", 200
	default:
		c.Thing, c.Kind, c.Limit = of("leased"), "leased charge", 200
	}
	return w.record(n, c, perform).Outcome == done
}

// record makes a call, and notes its answer.
func (w *world) record(client int, c call, perform func(call) reply) reply {
	if pgtest.Random(w.T).IntN(25) == 0 && !w.calm.Load() {
		c.Leaves = 1 + time.Duration(pgtest.Random(w.T).Int64N(int64(10*time.Millisecond)))
		w.faults["left"].Add(1)
	}
	if c.Kind == "usage" || c.Kind == "look" {
		c.ID = ""
	}
	c.Dice = pgtest.Random(w.T).IntN(60)
	h := recorded{Operation: porcupine.Operation{ClientId: client, Input: c}}
	h.Call = int64(time.Since(w.began))
	r := perform(c)
	h.Return = int64(time.Since(w.began))
	w.ended.Add(1)
	if r.Outcome == unknown {
		w.unknown.Add(1)
		h.Return = math.MaxInt64
	}
	if strings.Contains(r.Error, sqlstate.DiskFull) {
		w.faults["met a full disk"].Add(1)
	}
	if c.ID == "" && r.Outcome != done {
		return r // a reading that failed says nothing
	}
	h.outcome, h.Output = r.Outcome, r.Answer
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, h)
	return r
}

// token is the token of a name, which the first call mints, or "" if that failed: then nobody has presented it.
func (w *world) token(name string, perform func(call) reply) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.tokens[name] == "" {
		if r := perform(call{Thing: name, Kind: "mint", ID: metered.NewID()}); r.Outcome == done {
			w.tokens[name] = r.Answer.State
		}
	}
	return w.tokens[name]
}
