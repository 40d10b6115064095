package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The limits of the load's scopes.
var (
	orgLimits = []budget.Limit{
		budget.PerWindow(300, time.Minute).Named("a minute").WithThresholds(budget.Threshold{Name: "80%", Percent: 80}),
		budget.PerWindow(20_000, 24*time.Hour).Named("a day"),
	}
	seatLimits   = []budget.Limit{budget.Lifetime(1).Named("seats")}
	callLimits   = []budget.Limit{budget.PerWindow(100_000, time.Hour).Named("an hour")}
	walletLimits = []budget.Limit{budget.Prepaid(0).Named("credit")}
)

// demoLimits are the limits of one of the load's scopes.
func demoLimits(scope string) []budget.Limit {
	kind, _, _ := strings.Cut(scope, "/")
	return map[string][]budget.Limit{"org": orgLimits, "seat": seatLimits, "api": callLimits,
		"wallet": walletLimits}[kind]
}

const (
	loadWorkers = 8
	loadOrgs    = 1000
	loadSeats   = 400
	loadWallets = 20
)

// load is a made-up load on a database.
type load struct {
	pool   *pgxpool.Pool
	client *metered.Client
	wallet *wallet.Book
	leased *leases.Pool
	river  *river.Client[pgx.Tx]
	log    io.Writer

	cancel  context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	seats  []string // ids of holds that were placed
	billed []budget.Posted
	told   time.Time
}

type renderArgs struct {
	Page int `json:"page"`
}

func (renderArgs) Kind() string { return "render" }

type renderer struct {
	river.WorkerDefaults[renderArgs]
}

func (renderer) Work(_ context.Context, job *river.Job[renderArgs]) error {
	if job.Args.Page%20 == 0 && job.Attempt < 3 {
		return errors.New("the printer is out of paper")
	}
	return nil
}

// printArgs are a job that waits for the one printer.
type printArgs struct {
	Pages int `json:"pages"`
}

func (printArgs) Kind() string { return "print" }

type printer struct {
	river.WorkerDefaults[printArgs]
}

func (printer) Work(ctx context.Context, job *river.Job[printArgs]) error {
	select {
	case <-time.After(time.Duration(job.Args.Pages) * 200 * time.Millisecond):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// startLoad begins about rate acts a second, until stop.
func startLoad(ctx context.Context, pool *pgxpool.Pool, schema string, rate int,
	log io.Writer) (*load, error) {
	l := &load{pool: pool, log: log}
	workers := river.NewWorkers()
	river.AddWorker(workers, renderer{})
	river.AddWorker(workers, mailer{})
	river.AddWorker(workers, printer{})
	var err error
	l.river, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}}, Workers: workers,
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	ledger, err := budget.New(budget.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	l.leased, err = leases.New(pool, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "api/"}}})
	if err != nil {
		return nil, err
	}
	l.client, err = metered.New(pool, metered.Config{Config: budget.Config{Schema: schema,
		OnThreshold: l.warn}, River: l.river, Leases: l.leased})
	if err != nil {
		return nil, err
	}
	if l.wallet, err = wallet.New(l.client.Budget,
		wallet.Config{Priorities: map[string]int{"promotional": -1}}); err != nil {
		return nil, err
	}
	if err := l.river.Start(ctx); err != nil {
		return nil, err
	}
	ctx, l.cancel = context.WithCancel(ctx)
	for range loadWorkers {
		l.every(ctx, loadWorkers*time.Second/time.Duration(rate), l.act)
	}
	l.every(ctx, 2*time.Second, func(ctx context.Context) error {
		_, held := l.client.Holds.Sweep(ctx, pool, holds.SweepOptions{})
		_, lots := l.wallet.Sweep(ctx, pool, wallet.SweepOptions{})
		return errors.Join(held, lots)
	})
	l.every(ctx, 2*time.Second, l.print)
	l.running.Go(func() {
		if err := l.client.Jobs.Run(ctx, pool, l.tell); err != nil && ctx.Err() == nil {
			l.tell(err)
		}
	})
	return l, nil
}

// print enqueues a job of about three seconds each two seconds, so that some wait in the printer's
// line, and the last ones in vain.
func (l *load) print(ctx context.Context) error {
	return l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := l.client.Jobs.Enqueue(ctx, tx, printArgs{1 + rand.IntN(30)}, &jobs.Options{
			Tenant: fmt.Sprintf("user-%d", rand.IntN(4)), MaxWait: 30 * time.Second,
			Hold: &jobs.Units{Lines: []holds.Line{{Scope: "seat/printer", Amount: 1,
				Limits: seatLimits}}},
		})
		return err
	})
}

// every runs act so often, until ctx ends.
func (l *load) every(ctx context.Context, interval time.Duration,
	act func(ctx context.Context) error) {
	l.running.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if err := act(ctx); err != nil && ctx.Err() == nil {
				l.tell(err)
			}
		}
	})
}

// tell prints an error, once in ten seconds.
func (l *load) tell(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.told) > 10*time.Second {
		l.told = time.Now()
		fmt.Fprintf(l.log, "load: %v\n", err)
	}
}

// stop ends the load, and gives its leases back.
func (l *load) stop(ctx context.Context) error {
	l.cancel()
	l.running.Wait()
	return errors.Join(l.river.StopAndCancel(ctx), l.leased.Close(ctx))
}

// act does one thing that a program would do. A refusal is no failure of it.
func (l *load) act(ctx context.Context) error {
	acts := []struct {
		weight int
		do     func(ctx context.Context) error
	}{{56, l.command}, {12, l.place}, {8, l.end}, {12, l.lease}, {4, l.refund}, {5, l.draw},
		{2, l.grant}, {1, l.session}}
	n := rand.IntN(100)
	for _, a := range acts {
		if n -= a.weight; n < 0 {
			err := a.do(ctx)
			if errors.Is(err, budget.ErrExceeded) || errors.Is(err, holds.ErrState) ||
				errors.Is(err, budget.ErrRefundExceeds) {
				return nil
			}
			return err
		}
	}
	return nil
}

// org is an organisation. A few are much more active than the others.
func org() string {
	n := int(float64(loadOrgs) * rand.ExpFloat64() / 100)
	return fmt.Sprintf("org/%04d", min(n*n/8, loadOrgs-1))
}

func (l *load) command(ctx context.Context) error {
	names := []string{"upload", "search", "render", "export"}
	name := names[rand.IntN(len(names))]
	amount := 1 + rand.Int64N(12)
	out, err := metered.Do(ctx, l.client, metered.Command{
		ID: metered.NewID(), Tenant: "demo", Name: name, Input: amount, RecordRefusal: true,
		Charges: []budget.Charge{{Scope: org(), Amount: amount, Limits: orgLimits,
			Note: budget.Note{Actor: fmt.Sprintf("user-%d", rand.IntN(50))}}},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		if name != "render" {
			return amount, nil
		}
		_, err := tx.Enqueue(ctx, renderArgs{rand.IntN(1000)}, &jobs.Options{Key: metered.NewID()})
		return amount, err
	})
	if err == nil {
		l.mu.Lock()
		l.billed = append(l.billed[max(0, len(l.billed)-200):], out.Receipt.Entries...)
		l.mu.Unlock()
	}
	return err
}

func (l *load) inTx(ctx context.Context, f func(ctx context.Context, tx pgx.Tx) error) error {
	return l.client.RunTx(ctx, pgx.TxOptions{}, f)
}

func (l *load) place(ctx context.Context) error {
	var id string
	err := l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		h, err := l.client.Holds.Place(ctx, tx, holds.Placement{
			Tenant: "hall", Holder: fmt.Sprintf("user-%d", rand.IntN(50)),
			TTL: time.Duration(5+rand.IntN(60)) * time.Second,
			Lines: []holds.Line{{Scope: fmt.Sprintf("seat/hall/%d", rand.IntN(loadSeats)),
				Amount: 1, Limits: seatLimits}},
		})
		id = h.ID
		return err
	})
	if err == nil { // not before: nobody else sees it until it is committed
		l.mu.Lock()
		l.seats = append(l.seats[max(0, len(l.seats)-200):], id)
		l.mu.Unlock()
	}
	return err
}

func (l *load) end(ctx context.Context) error {
	l.mu.Lock()
	n := len(l.seats)
	if n == 0 {
		l.mu.Unlock()
		return nil
	}
	i := rand.IntN(n)
	id := l.seats[i]
	l.seats[i] = l.seats[n-1]
	l.seats = l.seats[:n-1]
	l.mu.Unlock()
	return l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if rand.IntN(3) > 0 {
			_, err := l.client.Holds.Release(ctx, tx,
				holds.Release{Tenant: "hall", IDs: []string{id},
					Note: budget.Note{Reason: "changed their mind"}})
			return err
		}
		_, err := l.client.Holds.Capture(ctx, tx,
			holds.Capture{Tenant: "hall", IDs: []string{id}, All: true, Entity: "ticket-" + id[:8]})
		return err
	})
}

func (l *load) lease(ctx context.Context) error {
	return l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := l.leased.Charge(ctx, tx,
			budget.Charge{Scope: "api/calls", Amount: 1 + rand.Int64N(5),
				Limits: callLimits})
		return err
	})
}

func (l *load) refund(ctx context.Context) error {
	l.mu.Lock()
	if len(l.billed) == 0 {
		l.mu.Unlock()
		return nil
	}
	p := l.billed[rand.IntN(len(l.billed))]
	l.mu.Unlock()
	return l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := l.client.Budget.Refund(ctx, tx,
			budget.Refund{Scope: p.Scope, Seq: p.Seq, Amount: p.Amount,
				Note: budget.Note{Actor: "support", Reason: "goodwill"}})
		return err
	})
}

// warn is called with each threshold that a charge reaches. The job that writes to the customer
// commits with the charge.
func (l *load) warn(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, err := l.river.InsertTx(ctx, tx, mailArgs{c.Scope, c.Threshold.Name}, nil)
	return err
}

type mailArgs struct {
	Scope string `json:"scope"`
	Name  string `json:"name"`
}

func (mailArgs) Kind() string { return "mail" }

type mailer struct {
	river.WorkerDefaults[mailArgs]
}

func (mailer) Work(context.Context, *river.Job[mailArgs]) error { return nil }

func someWallet() string { return fmt.Sprintf("wallet/%d", rand.IntN(loadWallets)) }

func (l *load) grant(ctx context.Context) error {
	g := wallet.Grant{Wallet: someWallet(), Amount: 60, Category: "paid",
		Reference: "invoice-" + metered.NewID(), Note: budget.Note{Reason: "top-up"}}
	switch rand.IntN(4) {
	case 0: // a plan: the first grant of a wallet begins it, and all others change nothing
		g.Category, g.Reference, g.Amount = "plan", "plan-basic", 40
		g.Ends = wallet.EachPeriod(budget.Period{Unit: budget.Day, Zone: "UTC"})
	case 1: // for images alone
		g.Category, g.Reference, g.Amount, g.Uses = "images", "images-"+metered.NewID(), 15,
			[]string{"images"}
	case 2:
		g.Category, g.Reference, g.Amount = "promotional", "gift-"+metered.NewID(), 20
		g.Ends = wallet.After(time.Duration(1+rand.IntN(30)) * time.Minute)
	}
	return l.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := l.wallet.Grant(ctx, tx, g)
		return err
	})
}

func (l *load) draw(ctx context.Context) error {
	c := l.wallet.Charge(someWallet(), 1+rand.Int64N(15))
	name := "text"
	if rand.IntN(2) == 0 {
		name, c.Note.Use = "image", "images" // lots for images pay for it, too
	}
	_, err := metered.Do[int](ctx, l.client, metered.Command{
		ID: metered.NewID(), Tenant: "demo", Name: name, RecordRefusal: true,
		Charges: []budget.Charge{c},
	}, nil)
	return err
}

// session reserves units of a wallet, works for some seconds, and settles the units that the work
// took.
func (l *load) session(ctx context.Context) error {
	s, err := metered.Open[int](ctx, l.client, metered.Reservation{
		ID: metered.NewID(), Tenant: "demo", Name: "transcribe", TTL: time.Minute,
		Lines: []holds.Line{l.wallet.Line(someWallet(), 20)},
	})
	if err != nil {
		return err
	}
	l.running.Go(func() {
		defer s.Close()
		select {
		case <-time.After(time.Duration(3+rand.IntN(20)) * time.Second):
		case <-ctx.Done():
			return
		}
		line := s.Hold().Lines[0]
		line.Amount = 1 + rand.Int64N(line.Amount)
		_, err := s.Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: line.Scope,
			Amount: line.Amount}}}, nil)
		if err != nil && ctx.Err() == nil {
			l.tell(err)
		}
	})
	return nil
}
