package carvejobs

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
)

var errArgument = fault.New("invalid_argument", "carvejobs: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

// Config configures Clusters. The zero value has the documented defaults.
type Config struct {
	// Queue is the queue of the jobs, on both clusters. Defaults to River's default queue.
	Queue string

	// RetryAfter is the time after which a job that could not reach the other cluster, or waits
	// for held units, is tried again. It is tried for ever. It is from 10ms to 1h. Defaults to 5s.
	RetryAfter time.Duration

	// OnError gets the reason why a job is tried again, unless River is stopping. Defaults to
	// none.
	OnError func(error)
}

// Clusters are safe for concurrent use.
type Clusters struct {
	cfg Config
	all map[string]*cluster
}

type cluster struct {
	client *metered.Client
	carver *leases.Carver
}

// New takes the clients by names of clusters, which jobs store: they must stay. Each needs
// metered.Config.River.
func New(clients map[string]*metered.Client, cfg Config) (*Clusters, error) {
	cfg.RetryAfter = cmp.Or(cfg.RetryAfter, 5*time.Second)
	if cfg.RetryAfter < 10*time.Millisecond || cfg.RetryAfter > time.Hour {
		return nil, invalid("Config.RetryAfter", "%v is not from 10ms to 1h", cfg.RetryAfter)
	}
	c := &Clusters{cfg: cfg, all: make(map[string]*cluster, len(clients))}
	for name, client := range clients {
		if client == nil || client.Budget == nil || client.Jobs == nil {
			return nil, invalid("clients", "that of %q was not made by metered.New with Config.River", name)
		}
		carver, err := leases.NewCarver(client.Budget)
		if err != nil {
			return nil, err
		}
		c.all[name] = &cluster{client, carver}
	}
	return c, nil
}

func (c *Clusters) made() error { return fault.Made(errArgument, "clusters", c != nil && c.all != nil) }

// Link names a child and its clusters.
type Link struct {
	// Home is the name of the parent's cluster.
	Home string `json:"home"`

	// Away is the name of the child's cluster.
	Away string `json:"away"`

	// Child is the child's scope, as in leases.Carving, of up to 255 bytes.
	Child string `json:"child"`
}

// find returns the clusters of a link.
func (c *Clusters) find(l Link) (home, away *cluster, err error) {
	if err := c.made(); err != nil {
		return nil, nil, err
	}
	home, away = c.all[l.Home], c.all[l.Away]
	switch {
	case home == nil:
		err = invalid("Link.Home", "%q is not among the clusters", l.Home)
	case away == nil:
		err = invalid("Link.Away", "%q is not among the clusters", l.Away)
	case l.Home == l.Away:
		err = invalid("Link.Away", "is Link.Home: use leases.Carver")
	case l.Child == "":
		err = invalid("Link.Child", "is empty")
	default:
		err = fault.Text(errArgument, "Link.Child", l.Child, bounds.MaxScopeBytes)
	}
	return home, away, err
}

// RemoteCarving is a carving whose child is on another cluster.
type RemoteCarving struct {
	Link

	// From is as in leases.Carving.
	From budget.Charge

	// TTL is as in leases.Carving.
	TTL time.Duration
}

// The tenants that own the ids of the steps' operations. The id is the child.
const (
	carveStep    = "metered/carve"
	creditStep   = "metered/carve/credit"
	closeStep    = "metered/carve/close"
	endStep      = "metered/carve/end"
	settleStep   = "metered/carve/settle"
	writeOffStep = "metered/carve/write_off"
)

// Carve takes the units at home, and a job gives them to the child. A second call returns the first
// result, or with another parent or amount budget.ErrConflict. Errors: those of
// leases.Carver.Carve and metered.Do.
func (c *Clusters) Carve(ctx context.Context, g RemoteCarving) (leases.Lease, error) {
	home, _, err := c.find(g.Link)
	if err != nil {
		return leases.Lease{}, err
	}
	input := struct {
		Link
		Parent string
		Amount int64
	}{g.Link, g.From.Scope, g.From.Amount}
	return do(ctx, home, carveStep, g.Child, input,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			l, err := home.carver.Carve(ctx, tx,
				leases.Carving{Child: g.Child, From: g.From, TTL: g.TTL, Away: true})
			if err != nil {
				return l, err
			}
			return l, c.enqueue(ctx, tx, creditArgs{g.Link, l.Granted, l.EndsAt, g.From.Note}, time.Time{})
		})
}

// End closes the child before its time, and a job settles at home. The Lease is the child's,
// without SettledAt while units are held. A child whose units are still on their way is closed as
// unused. Errors: those of leases.Carver.End and metered.Do.
func (c *Clusters) End(ctx context.Context, l Link, note budget.Note) (leases.Lease, error) {
	_, away, err := c.find(l)
	if err != nil {
		return leases.Lease{}, err
	}
	// The first step closes the child, for good. The second one ends it when nothing is held any
	// more.
	closed, err := do(ctx, away, closeStep, l.Child, l,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			closed, err := away.carver.End(ctx, tx, l.Child, note)
			if errors.Is(err, leases.ErrUnknownChild) {
				closed, err = away.carver.Receive(ctx, tx, leases.Lease{Child: l.Child, EndsAt: time.Now()}, note)
			}
			if err == nil && closed.SettledAt.IsZero() {
				return closed, c.enqueue(ctx, tx, endArgs{l}, time.Now().Add(c.cfg.RetryAfter))
			}
			return c.report(ctx, tx, l, closed, err)
		})
	if err != nil || !closed.SettledAt.IsZero() {
		return closed, err
	}
	ended, err := do(ctx, away, endStep, l.Child, l,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			ended, err := away.carver.End(ctx, tx, l.Child, note)
			if err == nil && ended.SettledAt.IsZero() {
				err = errHeld
			}
			return c.report(ctx, tx, l, ended, err)
		})
	if errors.Is(err, errHeld) {
		return closed, nil
	}
	return ended, err
}

var errHeld = errors.New("carvejobs: something is still held of the child")

// report enqueues the message with the number of units that a child spent.
func (c *Clusters) report(ctx context.Context, tx *metered.Tx, l Link, closed leases.Lease,
	err error) (leases.Lease, error) {
	if err == nil {
		err = c.enqueue(ctx, tx, spentArgs{l, closed.Spent}, time.Time{})
	}
	return closed, err
}

// WriteOff is leases.Carver.WriteOff at home. Unspent units are lost.
func (c *Clusters) WriteOff(ctx context.Context, l Link, note budget.Note) (leases.Lease, error) {
	home, _, err := c.find(l)
	if err != nil {
		return leases.Lease{}, err
	}
	return do(ctx, home, writeOffStep, l.Child, l,
		func(ctx context.Context, tx *metered.Tx) (leases.Lease, error) {
			return home.carver.WriteOff(ctx, tx, l.Child, note)
		})
}

// do runs a step.
func do(ctx context.Context, on *cluster, step, child string, input any,
	f metered.Func[leases.Lease]) (leases.Lease, error) {
	out, err := metered.Do(ctx, on.client,
		metered.Command{ID: child, Tenant: step, Name: step, Input: input}, f)
	return out.Result, err
}

// enqueue enqueues the job of the next step.
func (c *Clusters) enqueue(ctx context.Context, tx *metered.Tx, args jobArgs, at time.Time) error {
	opts := &jobs.Options{}
	opts.InsertOpts.Queue, opts.InsertOpts.ScheduledAt = c.cfg.Queue, at
	_, err := tx.Enqueue(ctx, args, opts)
	return err
}
