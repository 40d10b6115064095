package httpmetered

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/leases"
)

// LimitConfig says how a request is charged.
type LimitConfig struct {
	// Kind begins the scopes: budget.ScopeKey(Kind, "client", key), and (Kind, "all", "") for
	// Shared. LimitLeased needs a Rule for Kind + "/". Required.
	Kind string

	// Key names the client: the signed-in user, an API key, an address that your proxy vouches
	// for. "" is answered by 500, since all clients would be one, and an error as that of
	// IdempotentConfig.Tenant. Required with Limits.
	Key func(*http.Request) (string, error)

	// Limits are those of each client, each with a name: PerWindow(60, time.Minute).Named("burst").
	// See PoliciesConfig.Limits.
	Limits []budget.Limit

	// Shared are the limits of all clients together.
	Shared []budget.Limit

	// Amount returns the units of a request, or 0 for no charge. Defaults to 1.
	Amount func(*http.Request) (int64, error)

	// FailOpen lets requests pass while the database cannot be asked. Without it they are answered
	// by 503.
	FailOpen bool

	// OnError gets the errors of answers of 500 and more, and of requests that FailOpen let pass.
	// Defaults to slog.
	OnError func(*http.Request, error)
}

// Limit returns a middleware that charges each request before its handler, in its own transaction.
// If one limit refuses, nothing is charged, and Policies.Write answers.
//
// Answers have RateLimit-Policy and RateLimit. With both Limits and Shared a request costs three
// round trips, else one. Where more is due in a scope than one call may write, it is written first,
// in transactions that stay.
func Limit(db *pgxpool.Pool, ledger *budget.Ledger, cfg LimitConfig) (func(http.Handler) http.Handler, error) {
	if err := cmp.Or(fault.NotNil(errArgument, "db", db),
		fault.NotNil(errArgument, "ledger", ledger)); err != nil {
		return nil, err
	}
	name, wait, _ := inBudget.Settings(ledger)
	return newLimiter(cfg, func(ctx context.Context, charges []budget.Charge) (receipt budget.Receipt, err error) {
		if len(charges) == 1 {
			posted, err := ledger.ChargeNow(ctx, db, charges[0])
			return budget.Receipt{Entries: []budget.Posted{posted}}, err
		}
		err = sweep.Through(ctx, db, name, wait, func() error {
			return commit.InTx(ctx, db, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				receipt, err = ledger.Charge(ctx, tx, charges...)
				return err
			})
		})
		return receipt, err
	})
}

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Settings(l *budget.Ledger) (name schema.Name, wait time.Duration, actor bool)
}]("budget")

// LimitLeased is Limit from memory (leases.Pool.Allow). RateLimit shows this process's view.
func LimitLeased(pool *leases.Pool, cfg LimitConfig) (func(http.Handler) http.Handler, error) {
	if err := fault.NotNil(errArgument, "pool", pool); err != nil {
		return nil, err
	}
	limits := cfg.Shared
	if len(limits) == 0 {
		limits = cfg.Limits
	}
	// Refuse here the limits that the Pool would refuse at every request.
	if _, err := pool.Limiter(budget.Charge{Scope: budget.ScopeKey(cfg.Kind, "all", ""), Amount: 1,
		Limits: limits}); err != nil {
		return nil, err
	}
	return newLimiter(cfg, func(ctx context.Context, charges []budget.Charge) (budget.Receipt, error) {
		if err := pool.Allow(ctx, charges...); err != nil {
			return budget.Receipt{}, err
		}
		return pool.Receipt(charges...), nil
	})
}

type limiter struct {
	LimitConfig
	policies *Policies
	charge   func(context.Context, []budget.Charge) (budget.Receipt, error)
}

func newLimiter(cfg LimitConfig, charge func(context.Context, []budget.Charge) (budget.Receipt, error)) (func(http.Handler) http.Handler, error) {
	policies, err := policiesOf("LimitConfig", PoliciesConfig{Limits: cfg.Limits, Shared: cfg.Shared})
	switch {
	case err != nil:
		return nil, err
	case budget.ScopeKey(cfg.Kind, "all", "") != cfg.Kind+"/all":
		return nil, fault.Invalid(errArgument, "LimitConfig.Kind", "%q is empty, or has a / or %%", cfg.Kind)
	case len(cfg.Limits) > 0 && cfg.Key == nil:
		return nil, fault.Invalid(errArgument, "LimitConfig.Key",
			"is nil: LimitConfig.Limits are of each client")
	case len(cfg.Limits)+len(cfg.Shared) == 0:
		return nil, fault.Invalid(errArgument, "LimitConfig.Limits", "are none, and so are Shared")
	}
	if cfg.OnError == nil {
		cfg.OnError = logError
	}
	l := &limiter{cfg, policies, charge}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if l.admit(w, r) {
				next.ServeHTTP(w, r)
			}
		})
	}, nil
}

// admit charges a request, or answers it.
func (l *limiter) admit(w http.ResponseWriter, r *http.Request) bool {
	charges, err := l.charges(r)
	if err == nil && len(charges) > 0 {
		var receipt budget.Receipt
		if receipt, err = l.charge(r.Context(), charges); err == nil {
			l.policies.Show(w.Header(), receipt)
		} else if l.FailOpen && unasked(err) {
			l.OnError(r, err)
			return true
		}
	}
	if err == nil {
		return true
	}
	answered := err
	if fault.Is(err, "commit_unknown") { // nobody looks for a charge of a limit: the next request is another one
		answered = &Problem{Status: http.StatusServiceUnavailable, Code: "commit_unknown", RetryAfterSeconds: 1}
	}
	if l.policies.Write(w, answered) >= http.StatusInternalServerError {
		l.OnError(r, err)
	}
	return false
}

// unasked reports whether the database could not be asked. A busy one could: FailOpen must not
// reward whoever keeps it busy.
func unasked(err error) bool {
	if errors.Is(err, leases.ErrUnavailable) || fault.Is(err, "commit_unknown") {
		return true
	}
	return fault.Retryable(err) && !errors.Is(err, fault.ErrBusy) && !errors.Is(err, fault.ErrSerialization)
}

var errNoKey = errors.New("httpmetered: LimitConfig.Key returned none: all clients would be one")

func (l *limiter) charges(r *http.Request) (charges []budget.Charge, err error) {
	amount := int64(1)
	if l.Amount != nil {
		if amount, err = l.Amount(r); err != nil || amount == 0 {
			return nil, err
		}
	}
	if len(l.Limits) > 0 {
		key, err := l.Key(r)
		if err == nil && key == "" {
			err = errNoKey
		}
		if err != nil {
			return nil, err
		}
		charges = append(charges, budget.Charge{Scope: budget.ScopeKey(l.Kind, "client", key),
			Amount: amount, Limits: l.Limits})
	}
	if len(l.Shared) > 0 {
		charges = append(charges, budget.Charge{Scope: budget.ScopeKey(l.Kind, "all", ""),
			Amount: amount, Limits: l.Shared})
	}
	return charges, nil
}
