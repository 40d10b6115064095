package integration_test

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/note"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/notary"
	"github.com/pgmetered/metered/privacy"
	"github.com/pgmetered/metered/tokens"
)

// placed is a hold that was placed without the bouncer, and then captured if captured is set.
func (b *behind) placed(captured bool) holds.Hold {
	return given(b, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		h, err := b.d.Holds.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "held", Amount: 1, Limits: hourly}}, TTL: time.Hour})
		if err == nil && captured {
			_, err = b.d.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
		}
		return h, err
	})
}

func (b *behind) holds() {
	book := b.c.Holds
	ids := func(captured bool) []string { return []string{b.placed(captured).ID} }
	key := holds.Key{Type: "name", Value: b.id("claimed")}
	b.tx("Book.Place", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "held", Amount: 1, Limits: hourly}}, TTL: time.Hour}))
	})
	b.tx("Book.Claim", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "name", Value: b.id("name")}, Holder: "ann", TTL: time.Hour}))
	})
	b.tx("Book.Capture", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Capture(ctx, tx, holds.Capture{IDs: ids(false), All: true}))
	})
	b.tx("Book.Release", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Release(ctx, tx, holds.Release{IDs: ids(false)}))
	})
	b.tx("Book.Extend", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Extend(ctx, tx, holds.Extend{IDs: ids(false), By: time.Minute}))
	})
	b.tx("Book.Return", func(ctx context.Context, tx pgx.Tx) error {
		return second(book.Return(ctx, tx, holds.Return{IDs: ids(true), All: true}))
	})
	h := b.placed(false)
	b.tx("Book.Expire", func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := book.Expire(ctx, tx, holds.Expire{ID: h.ID, Deadline: h.Deadline})
		return err
	})
	b.try("Book.Get", func(ctx context.Context) error { return second(book.Get(ctx, b.pool, "", h.ID, "")) })
	b.try("Book.History", func(ctx context.Context) error { return second(book.History(ctx, b.pool, "", h.ID, "")) })
	b.try("Book.List", func(ctx context.Context) error { return second(book.List(ctx, b.pool, holds.Filter{})) })
	b.try("Book.Due", func(ctx context.Context) error { return second(book.Due(ctx, b.pool, holds.DueFilter{})) })
	given(b, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return b.d.Holds.Claim(ctx, tx, holds.Claim{Key: key, Holder: "ann", TTL: time.Hour})
	})
	b.try("Book.Claimed", func(ctx context.Context) error { return second(book.Claimed(ctx, b.pool, "", key)) })
	b.try("Book.Sweep", func(ctx context.Context) error { return second(book.Sweep(ctx, b.pool, holds.SweepOptions{})) })
}

func (b *behind) tokens() {
	store := b.c.Tokens
	mint := tokens.Mint{Purpose: "p", Subject: b.id("s")}
	minted := func() tokens.Minted {
		return given(b, func(ctx context.Context, tx pgx.Tx) (tokens.Minted, error) { return b.d.Tokens.Mint(ctx, tx, mint) })
	}
	b.tx("Store.Mint", func(ctx context.Context, tx pgx.Tx) error { return second(store.Mint(ctx, tx, mint)) })
	b.tx("Store.MintMany", func(ctx context.Context, tx pgx.Tx) error {
		return second(store.MintMany(ctx, tx, []tokens.Mint{mint, mint}))
	})
	b.tx("Store.Replace", func(ctx context.Context, tx pgx.Tx) error { return second(store.Replace(ctx, tx, mint)) })
	first, other := minted(), minted()
	b.try("Store.Inspect", func(ctx context.Context) error {
		return second(store.Inspect(ctx, b.pool, mint.Purpose, mint.Subject, first.Token.Reveal()))
	})
	b.tx("Store.Consume", func(ctx context.Context, tx pgx.Tx) error {
		return second(store.Consume(ctx, tx, mint.Purpose, mint.Subject, first.Token.Reveal()))
	})
	b.tx("Store.Revoke", func(ctx context.Context, tx pgx.Tx) error { return second(store.Revoke(ctx, tx, other.Token.Digest())) })
	b.tx("Store.RevokeSubject", func(ctx context.Context, tx pgx.Tx) error {
		return second(store.RevokeSubject(ctx, tx, mint.Purpose, mint.Subject))
	})
}

func (b *behind) jobs() {
	queue := b.c.Jobs
	b.tx("Enqueuer.Enqueue", func(ctx context.Context, tx pgx.Tx) error {
		return second(queue.Enqueue(ctx, tx, process{b.id("one")}, &jobs.Options{Key: b.id("one")}))
	})
	b.tx("Enqueuer.EnqueueMany", func(ctx context.Context, tx pgx.Tx) error {
		return second(queue.EnqueueMany(ctx, tx, []jobs.Item{{Args: process{"a"}, Options: &jobs.Options{Key: b.id("a")}}, {Args: process{"b"}}}))
	})
	record := given(b, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return b.id("found"), second(b.d.Jobs.Enqueue(ctx, tx, process{"found"}, &jobs.Options{Key: b.id("found")}))
	})
	b.try("Enqueuer.Find", func(ctx context.Context) error { return second(queue.Find(ctx, b.pool, "", record)) })
	scope := b.id("gated")
	gated := func(q *jobs.Enqueuer) func(ctx context.Context, tx pgx.Tx) (jobs.Result, error) {
		return func(ctx context.Context, tx pgx.Tx) (jobs.Result, error) {
			one := holds.Line{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}
			return q.Enqueue(ctx, tx, process{"gated"}, &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{one}}})
		}
	}
	given(b, gated(b.d.Jobs)) // it has the unit
	parked := given(b, gated(b.d.Jobs))
	b.tx("Enqueuer.Enqueue", func(ctx context.Context, tx pgx.Tx) error { return second(gated(queue)(ctx, tx)) })
	b.try("Enqueuer.Parked", func(ctx context.Context) error { return second(queue.Parked(ctx, b.pool, scope, 0, 10)) })
	b.try("Enqueuer.Explain", func(ctx context.Context) error { return second(queue.Explain(ctx, b.pool, parked.JobID)) })
	b.try("Enqueuer.Release", func(ctx context.Context) error { return second(queue.Release(ctx, b.pool)) })
	b.tx("Enqueuer.ReleaseIn", func(ctx context.Context, tx pgx.Tx) error { return second(queue.ReleaseIn(ctx, tx, scope)) })
	b.tx("Enqueuer.Reprioritize", func(ctx context.Context, tx pgx.Tx) error {
		return second(queue.Reprioritize(ctx, tx, parked.JobID, 2))
	})
	b.tx("Enqueuer.CancelParked", func(ctx context.Context, tx pgx.Tx) error { return second(queue.CancelParked(ctx, tx, parked.JobID)) })
}

func (b *behind) leases() {
	lent, err := leases.New(b.pool, b.c.Budget, leases.Config{Rules: []leases.Rule{{Prefix: "leased"}}, NoRecall: true})
	require.NoError(b.t, err)
	charge := budget.Charge{Scope: "leased", Amount: 1, Limits: hourly}
	b.try("Pool.Allow", func(ctx context.Context) error { return lent.Allow(ctx, charge) })
	limiter, err := lent.Limiter(charge)
	require.NoError(b.t, err)
	b.try("Pool.Limiter", func(ctx context.Context) error { return limiter(ctx, 1) })
	b.tx("Pool.Charge", func(ctx context.Context, tx pgx.Tx) error { return second(lent.Charge(ctx, tx, charge)) })
	b.try("Pool.History", func(ctx context.Context) error {
		for lease, err := range lent.History(ctx, b.pool, "leased") {
			if err != nil {
				return err
			}
			b.try("Pool.Spends", func(ctx context.Context) error {
				for _, err := range lent.Spends(ctx, b.pool, lease.No) {
					if err != nil {
						return err
					}
				}
				return nil
			})
		}
		return nil
	})
	b.called["Pool.Spends"] = true // where no lease could be opened there is none
	b.try("leases.Sweep", func(ctx context.Context) error { return second(leases.Sweep(ctx, b.pool, b.c.Budget)) })
	b.try("Pool.Close", lent.Close)

	carver, err := leases.NewCarver(b.c.Budget)
	require.NoError(b.t, err)
	direct, err := leases.NewCarver(b.d.Budget)
	require.NoError(b.t, err)
	carving := func(child string, away bool) leases.Carving {
		return leases.Carving{Child: b.id(child), From: budget.Charge{Scope: "parent", Amount: 2, Limits: hourly}, TTL: time.Hour, Away: away}
	}
	b.tx("Carver.Carve", func(ctx context.Context, tx pgx.Tx) error {
		return second(carver.Carve(ctx, tx, carving("carve", false)))
	})
	for child, away := range map[string]bool{"close": false, "settle": true, "write off": true} {
		given(b, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
			return direct.Carve(ctx, tx, carving(child, away))
		})
	}
	b.try("Carver.Get", func(ctx context.Context) error { return second(carver.Get(ctx, b.pool, b.id("close"))) })
	b.tx("Carver.End", func(ctx context.Context, tx pgx.Tx) error {
		return second(carver.End(ctx, tx, b.id("close"), budget.Note{}))
	})
	b.tx("Carver.SettleAway", func(ctx context.Context, tx pgx.Tx) error {
		return second(carver.SettleAway(ctx, tx, b.id("settle"), 1, budget.Note{}))
	})
	b.tx("Carver.WriteOff", func(ctx context.Context, tx pgx.Tx) error {
		return second(carver.WriteOff(ctx, tx, b.id("write off"), budget.Note{}))
	})
	b.tx("Carver.Receive", func(ctx context.Context, tx pgx.Tx) error {
		return second(carver.Receive(ctx, tx, leases.Lease{Child: b.id("received"), Granted: 1, EndsAt: time.Now().Add(time.Hour)}, budget.Note{}))
	})
}

// records makes the calls about persons, and those of a log that others can check.
func (b *behind) records() {
	ann, alias := "user/"+b.id("ann"), b.id("gone")
	given(b, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		return b.d.Budget.Charge(ctx, tx, budget.Charge{Scope: ann, Amount: 1, Note: budget.Note{Actor: ann}})
	})
	office, err := notary.New(notary.Config{Schema: b.schema, LockTimeout: time.Minute})
	require.NoError(b.t, err)
	private, public, err := note.GenerateKey(rand.Reader, "ledger.example")
	require.NoError(b.t, err)
	signer, err := note.NewSigner(private)
	require.NoError(b.t, err)
	verifier, err := note.NewVerifier(public)
	require.NoError(b.t, err)
	b.try("Notary.Notarize", func(ctx context.Context) error { return second(office.Notarize(ctx, b.pool, signer)) })
	given(b, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) { // there is a new head in each case
		return b.d.Budget.Charge(ctx, tx, budget.Charge{Scope: ann, Amount: 1})
	})
	head, err := office.Notarize(b.t.Context(), b.direct, signer)
	require.NoError(b.t, err)
	b.try("Notary.Verify", func(ctx context.Context) error {
		report, err := office.Verify(ctx, b.pool, []byte(head.Note), verifier)
		if err == nil {
			require.Empty(b.t, report.Differences)
			require.Positive(b.t, report.Checked)
		}
		return err
	})
	b.try("Notary.Receipt", func(ctx context.Context) error { return second(office.Receipt(ctx, b.pool, ann, 2)) })

	register, err := privacy.New(privacy.Config{Schema: b.schema, LockTimeout: time.Minute})
	require.NoError(b.t, err)
	b.try("Register.Export", func(ctx context.Context) error {
		rows := 0
		for _, err := range register.Export(ctx, b.pool, ann) {
			if err != nil {
				return err
			}
			rows++
		}
		require.GreaterOrEqual(b.t, rows, 2)
		return nil
	})
	b.tx("Register.Pseudonymize", func(ctx context.Context, tx pgx.Tx) error {
		report, err := register.Pseudonymize(ctx, tx, ann, alias)
		if err == nil {
			require.True(b.t, report.Done)
		}
		return err
	})
}
