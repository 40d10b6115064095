package main

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// service renders pages for accounts that have a plan, and a wallet beside it.
type service struct {
	pool    *pgxpool.Pool
	river   *river.Client[pgx.Tx]
	metered *metered.Client
	book    *wallet.Book
}

// plan is a monthly subscription.
type plan struct {
	Fee      int64 // in cents
	Included int64 // units of each month, in a lot that ends with it
	RollCap  int64 // of which so many go on for a month
	Cap      int64 // units a month at most, however full the wallet: it stops a loop
}

var plans = map[string]plan{
	"small": {Fee: 20_00, Included: 1_000, RollCap: 200, Cap: 2_000},
	"large": {Fee: 80_00, Included: 5_000, RollCap: 1_000, Cap: 10_000},
}

// overdraft is how far below zero an account may go. It is billed with the month.
const overdraft = 500

// The categories of credit, in the order in which it is spent: first to end first, paid credit last.
const (
	ofPlan      = "plan"
	promotional = "promotional"
	paid        = "paid"
)

func newService(pool *pgxpool.Pool) (*service, error) {
	s := &service{pool: pool}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(s.alert))
	river.AddWorker(workers, river.WorkFunc(s.closeBooks))
	var err error
	s.river, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}},
		Workers: workers,
		PeriodicJobs: []*river.PeriodicJob{river.NewPeriodicJob(river.PeriodicInterval(10*time.Minute),
			func() (river.JobArgs, *river.InsertOpts) { return closing{}, nil }, nil)},
		FetchPollInterval: 100 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return nil, err
	}
	enqueuer, err := jobs.New(s.river, jobs.Config{})
	if err != nil {
		return nil, err
	}
	s.metered, err = metered.New(pool, metered.Config{River: s.river, Config: budget.Config{OnThreshold: crossed(enqueuer)}})
	if err != nil {
		return nil, err
	}
	s.book, err = wallet.New(s.metered.Budget, wallet.Config{
		Overdraft: overdraft, Priorities: map[string]int{ofPlan: 0, promotional: 1, paid: 2},
	})
	return s, err
}

// account is one that has subscribed.
type account struct {
	ID, Plan, Zone      string
	Since, Starts, Ends time.Time
	Lots, Next          string
}

// wallets are the scopes of accounts, each with a wallet's lots and the month's use.
var wallets = budget.Scopes[string]{Kind: "wallet"}

func scope(id string) string { return wallets.Scope(id) }

const accountSQL = `select id, plan, zone, since, starts, ends, lots, next from accounts where id = $1`

func find(ctx context.Context, db budget.Querier, sql, id string) (account, error) {
	rows, _ := db.Query(ctx, sql, id)
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[account])
}

// month is the plan's cap, in the account's months, by the account's clock. Each of its thresholds fires once a
// month.
func (a account) month() (budget.Limit, error) {
	zone, err := time.LoadLocation(a.Zone)
	if err != nil {
		return budget.Limit{}, err
	}
	limit := budget.Per(plans[a.Plan].Cap, budget.Month, zone, a.Since).Named("month")
	return limit.WithThresholds(budget.Threshold{Name: "80%", Percent: 80}), nil
}

// now is the account's month by the database's clock.
func (s *service) now(ctx context.Context, db budget.Querier, a account) (starts, ends time.Time, err error) {
	month, err := a.month()
	if err != nil {
		return starts, ends, err
	}
	usage, err := s.metered.Budget.Usage(ctx, db, budget.Query{Scope: scope(a.ID), Period: month.Period})
	if err != nil {
		return starts, ends, err
	}
	return usage[0].PeriodStart, usage[0].PeriodEnd, nil
}

// subscribe begins the first month of an account.
func (s *service) subscribe(ctx context.Context, a account) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		if a.Starts, a.Ends, err = s.now(ctx, tx, a); err != nil {
			return err
		}
		included, err := a.included("plan")
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `insert into accounts values ($1, $2, $3, $4, $5, $6, $7, $7)`,
			a.ID, a.Plan, a.Zone, a.Since, a.Starts, a.Ends, included.Reference)
		if err == nil {
			_, err = s.book.Grant(ctx, tx, included)
		}
		return err
	})
}

// included is the grant of the plan's units: a lot for each of the account's months, without a job. At the month's end
// it lapses, but for the part that rolls over for another 31 days.
func (a account) included(reference string) (wallet.Grant, error) {
	month, err := a.month()
	p := plans[a.Plan]
	return wallet.Grant{
		Wallet: scope(a.ID), Amount: p.Included, Category: ofPlan, Reference: reference, Ends: wallet.EachPeriod(month.Period),
		Roll: &wallet.Roll{Cap: p.RollCap, Lasts: wallet.For(31 * 24 * time.Hour)}, LateRefunds: wallet.Lapse, Note: budget.Note{Reason: "plan " + a.Plan},
	}, err
}

const planSQL = `update accounts set plan = $2, next = $3 where id = $1`

// change gives an account another plan, once for each message that asks for it. Its cap counts from the next charge on, with
// this month's usage. Its units and its fee count from the next month on.
func (s *service) change(ctx context.Context, message, id, plan string) error {
	if _, err := s.renew(ctx, id); err != nil { // the plan of a month that is over has ended
		return err
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		a, err := find(ctx, tx, lockAccountSQL, id)
		if err != nil {
			return err
		}
		a.Plan = plan
		included, err := a.included(message)
		if err != nil {
			return err
		}
		changed, err := s.book.Change(ctx, tx, wallet.Change{Wallet: scope(id), Reference: message, Plan: a.Lots, To: &included, AtEnd: true})
		if err != nil || changed.Replayed {
			return err
		}
		_, err = tx.Exec(ctx, planSQL, id, plan, message)
		return err
	})
}
