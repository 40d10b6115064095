package otelmetered

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/dbconv"
	"go.opentelemetry.io/otel/semconv/v1.43.0/messagingconv"
)

// Labels that have no semantic convention. Their values are in the README's table.
const (
	labelCommand    = attribute.Key("metered.command")
	labelOutcome    = attribute.Key("metered.outcome")
	labelCause      = attribute.Key("metered.cause")
	labelLimit      = attribute.Key("metered.limit")
	labelResolution = attribute.Key("metered.resolution")
	labelReason     = attribute.Key("metered.reason")
	labelTransition = attribute.Key("metered.transition")
	labelPending    = attribute.Key("metered.pending")
	labelResult     = attribute.Key("metered.result")
	labelTable      = attribute.Key("metered.table")
	labelUnits      = attribute.Key("metered.units")
	labelLabel      = attribute.Key("metered.label")
	labelSweep      = attribute.Key("metered.sweep")
	labelLots       = attribute.Key("metered.lot")
	labelSession    = attribute.Key("metered.session")
	labelConsumer   = attribute.Key("metered.consumer")
)

// Kinds of sweeps, as labels.
const (
	sweepOfHolds = "holds"
	sweepOfLots  = "lots"
)

// river is the system of messages.
var river = semconv.MessagingSystemKey.String("river")

// seconds are the bounds of durations: from a round trip to a statement timeout.
var seconds = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

// instruments are the package's metrics.
type instruments struct {
	commands, function, database, wait, sweep, purge, enqueue duration
	roundTrips, batch                                         metric.Int64Histogram

	retries, lockTimeouts, refusals, thresholds, lost, resolved, consumed, refused, holds,
	jobs counter
	left, purged, leased, recalls, overflow, lots, lapsed,
	sessions counter

	out metric.Int64UpDownCounter
	lag lag
}

func newInstruments(m metric.Meter) (*instruments, error) {
	var all instruments
	var failed []error
	histogram := func(name, description string, always ...attribute.KeyValue) duration {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"),
			metric.WithDescription(description), metric.WithExplicitBucketBoundaries(seconds...))
		failed = append(failed, err)
		return duration{h, &sets{always: always}}
	}
	count := func(name, unit, description string) counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		failed = append(failed, err)
		return counter{c, &sets{}}
	}
	number := func(name, unit, description string, bounds ...float64) metric.Int64Histogram {
		h, err := m.Int64Histogram(name, metric.WithUnit(unit), metric.WithDescription(description),
			metric.WithExplicitBucketBoundaries(bounds...))
		failed = append(failed, err)
		return h
	}
	all.commands = histogram("metered.command.duration",
		"How long commands took, with all their attempts")
	all.function = histogram("metered.function.duration", "How long the functions of commands took")
	all.database = histogram(dbconv.ClientOperationDuration{}.Name(),
		dbconv.ClientOperationDuration{}.Description(), semconv.DBSystemNamePostgreSQL)
	all.wait = histogram(dbconv.ClientConnectionWaitTime{}.Name(),
		dbconv.ClientConnectionWaitTime{}.Description(),
		semconv.DBClientConnectionPoolName("metered"))
	all.enqueue = histogram(messagingconv.ClientOperationDuration{}.Name(),
		messagingconv.ClientOperationDuration{}.Description(), river,
		semconv.MessagingOperationName("enqueue"), semconv.MessagingOperationTypeSend)
	all.sweep = histogram("metered.sweep.duration", "How long sweeps of due holds and lots took")
	all.purge = histogram("metered.purge.duration", "How long purges took")
	all.roundTrips = number("metered.command.round_trips", "{round_trip}",
		"Round trips of a command, without those of its function", 2, 3, 4, 5, 6, 8, 12, 20, 50)
	all.batch = number("metered.batch.size", "{charge}",
		"Charges that a transaction of a Batcher made", 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

	all.retries = count("metered.retries", "{retry}",
		"Transactions that ran again, since they met others")
	all.lockTimeouts = count("metered.lock.timeouts", "{timeout}",
		"Waits for locks that ran into the lock timeout")
	all.refusals = count("metered.refusals", "{refusal}",
		"Charges and holds that a limit refused, by the limit's name")
	all.thresholds = count("metered.thresholds", "{crossing}",
		"Thresholds that were crossed, by the names of limit and threshold")
	all.lost = count("metered.commits.lost", "{commit}",
		"Commands and charges whose answer to COMMIT was lost")
	all.resolved = count("metered.commits.resolved", "{commit}",
		"Outcomes of commands and charges whose answer to COMMIT was lost")
	all.consumed = count("metered.tokens.consumed", "{token}", "Tokens that were consumed")
	all.refused = count("metered.tokens.refused", "{token}", "Tokens that were refused, by reason")
	all.holds = count("metered.hold.transitions", "{hold}",
		"Holds that were placed, captured, released and so on")
	all.jobs = count("metered.jobs", "{job}",
		"Jobs that were enqueued, or that were there under their key")
	all.left = count("metered.sweep.left", "{hold}",
		"Due holds and lots that a sweep left for the next one")
	all.purged = count("metered.purge.rows", "{row}", "Rows that purges deleted")
	all.leased = count("metered.lease.units", "{unit}",
		"Units that leases took, spent and gave back")
	all.recalls = count("metered.lease.recalls", "{recall}",
		"Refusals that asked all processes for their slices of a scope")
	all.lots = count("metered.lots", "{lot}",
		"Lots of wallets that were granted, revoked, rolled over, or ended by a sweep")
	all.lapsed = count("metered.lots.lapsed", "{unit}",
		"Units that lapsed of lots, as sweeps met them")
	all.sessions = count("metered.sessions", "{session}",
		"Outcomes of sessions: opened, renewed, settled and so on")
	all.overflow = count("metered.labels.overflow", "{value}",
		"Values that were counted as other, since a label has too many")

	var err error
	all.out, err = m.Int64UpDownCounter("metered.lease.out", metric.WithUnit("{unit}"),
		metric.WithDescription("Units of the slices that this process has"))
	failed = append(failed, err)
	all.lag.sets = &sets{}
	all.lag.Float64Gauge, err = m.Float64Gauge("metered.sweep.lag", metric.WithUnit("s"),
		metric.WithDescription("How late the oldest due hold or lot was when the last sweep began"))
	failed = append(failed, err)
	return &all, errors.Join(append(failed, err)...)
}

// zero exports counters that alerts watch for growth, before their first event: otherwise the first
// would not be growth.
func (all *instruments) zero() {
	for _, c := range []struct {
		counter
		label  attribute.Key
		values []string
	}{
		{all.lost, "", []string{""}}, {all.recalls, "", []string{""}},
		{all.resolved, labelResolution,
			[]string{"committed", "not_committed", "unknown", "left"}},
		{all.retries, labelCause, []string{"serialization", "deadlock", "lease_closed"}},
		{all.lapsed, "", []string{""}},
		{all.sessions, labelSession, []string{"opened", "renewed", "not_renewed", "settled",
			"cancelled", "lost", "abandoned"}},
		{all.refused, labelReason, []string{"malformed", "unknown", "purpose", "subject", "revoked",
			"used", "expired"}},
		{all.overflow, labelLabel, []string{"command", "limit", "job", "error"}},
	} {
		for _, value := range c.values {
			c.add(context.Background(), 0, labels{{c.label, value}})
		}
	}
	for _, reason := range []string{"skipped", "failed"} {
		for _, of := range []string{sweepOfHolds, sweepOfLots} {
			all.left.add(context.Background(), 0, labels{{labelSweep, of}, {labelReason, reason}})
		}
	}
}

// label is a label and its value. One without a value is left out.
type label struct {
	Key   attribute.Key
	Value string
}

// labels are those of a measurement.
type labels [3]label

// sets are the attribute sets of an instrument, made once for each combination, of which there are
// few.
type sets struct {
	always []attribute.KeyValue
	known  memo[labels, metric.MeasurementOption]
}

func (s *sets) of(l labels) metric.MeasurementOption {
	return s.known.of(l, func() metric.MeasurementOption {
		pairs := slices.Clone(s.always)
		for _, pair := range l {
			if pair.Key != "" && pair.Value != "" {
				pairs = append(pairs, pair.Key.String(pair.Value))
			}
		}
		return metric.WithAttributeSet(attribute.NewSet(pairs...))
	})
}

type duration struct {
	metric.Float64Histogram
	*sets
}

func (d duration) record(ctx context.Context, began time.Time, l labels) {
	d.Record(ctx, time.Since(began).Seconds(), d.of(l))
}

type lag struct {
	metric.Float64Gauge
	*sets
}

func (l lag) record(ctx context.Context, late time.Duration, of label) {
	l.Record(ctx, late.Seconds(), l.of(labels{of}))
}

type counter struct {
	metric.Int64Counter
	*sets
}

func (c counter) add(ctx context.Context, n int64, l labels) { c.Add(ctx, n, c.of(l)) }
