package otelmetered

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgmetered/metered/observe"
)

// Config configures an Observer. The zero value uses OpenTelemetry's global providers.
type Config struct {
	// MeterProvider makes the instruments. Defaults to otel.GetMeterProvider().
	MeterProvider metric.MeterProvider

	// TracerProvider makes the spans. Defaults to otel.GetTracerProvider().
	TracerProvider trace.TracerProvider

	// MaxNames bounds the names of commands, of limits and of kinds of jobs, each, 1 to 1,000.
	// Further ones are "other". Defaults to 100.
	MaxNames int

	// NoIDs leaves the ids and tenants of operations out of spans.
	NoIDs bool
}

// Observer measures and traces everything that has it as Observer in its Config. It is safe for
// concurrent use.
type Observer struct {
	meter  metric.Meter
	tracer trace.Tracer
	noIDs  bool
	m      *instruments

	commands, limits, kinds, errors names
	known                           memo[observe.Op, known] // by Work and Name
}

var _ observe.Observer = (*Observer)(nil)

const scope = "github.com/pgmetered/metered/otelmetered"

// New returns an Observer, or an error of the provider.
func New(cfg Config) (*Observer, error) {
	if cfg.MaxNames == 0 {
		cfg.MaxNames = 100
	}
	if cfg.MaxNames < 1 || cfg.MaxNames > 1000 {
		return nil, fmt.Errorf("otelmetered: Config.MaxNames: %d is not from 1 to 1,000",
			cfg.MaxNames)
	}
	if cfg.MeterProvider == nil {
		cfg.MeterProvider = otel.GetMeterProvider()
	}
	if cfg.TracerProvider == nil {
		cfg.TracerProvider = otel.GetTracerProvider()
	}
	o := &Observer{
		meter:  cfg.MeterProvider.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL)),
		noIDs:  cfg.NoIDs,
		tracer: cfg.TracerProvider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL)),
	}
	var err error
	if o.m, err = newInstruments(o.meter); err != nil {
		return nil, fmt.Errorf("otelmetered: %w", err)
	}
	for name, n := range map[string]*names{"command": &o.commands, "limit": &o.limits,
		"job": &o.kinds, "error": &o.errors} {
		n.max, n.full = int64(cfg.MaxNames),
			func() { o.m.overflow.add(context.Background(), 1, labels{{labelLabel, name}}) }
	}
	o.m.zero()
	return o, nil
}

// Start implements observe.Observer.
func (o *Observer) Start(ctx context.Context, op observe.Op) (context.Context, func(observe.End)) {
	switch op.Work {
	case observe.Command:
		op.Name = o.commands.of(op.Name)
	case observe.Enqueue:
		op.Name = o.kinds.of(op.Name)
	}
	began := time.Now()
	of := o.known.of(observe.Op{Work: op.Work, Name: op.Name}, func() known { return describe(op) })
	if within := trace.SpanContextFromContext(ctx); op.Work != observe.Command &&
		within.IsValid() && !within.IsSampled() {
		// The trace is not sampled: no more spans are made for it.
		return ctx, func(end observe.End) {
			o.measure(ctx, op, of.operation, began, end,
				o.errorType(end))
		}
	}
	ctx, span := o.tracer.Start(ctx, of.span, of.options...)
	if span.IsRecording() {
		span.SetAttributes(o.begun(op)...)
	}
	return ctx, func(end observe.End) {
		wrong := o.errorType(end)
		o.measure(ctx, op, of.operation, began, end, wrong)
		if span.IsRecording() {
			o.ended(span, op, end, wrong)
		}
		span.End()
	}
}

// measure takes the measures of a piece of work.
func (o *Observer) measure(ctx context.Context, op observe.Op, name string, began time.Time,
	end observe.End, wrong string) {
	failed := label{semconv.ErrorTypeKey, wrong}
	switch op.Work {
	case observe.Command:
		o.m.commands.record(ctx, began, labels{{labelCommand, op.Name},
			{labelOutcome, string(end.Outcome)}, failed})
		if end.RoundTrips > 0 {
			o.m.roundTrips.Record(ctx, int64(end.RoundTrips))
		}
	case observe.Function:
		o.m.function.record(ctx, began, labels{})
	case observe.Connect:
		o.m.wait.record(ctx, began, labels{})
	case observe.Enqueue:
		o.m.enqueue.record(ctx, began, labels{failed})
	case observe.Sweep:
		of := sweepOfHolds
		if op.Name != "" {
			of = op.Name
		}
		o.m.sweep.record(ctx, began, labels{{labelSweep, of}, failed})
	case observe.Purge:
		o.m.purge.record(ctx, began, labels{{labelTable, op.Name}, failed})
	default: // flushes, calls, batches, leases
		o.m.database.record(ctx, began, labels{{semconv.DBOperationNameKey, name}, failed})
		if end.Code == "busy" {
			o.m.lockTimeouts.add(ctx, 1, labels{{semconv.DBOperationNameKey, name}})
		}
		if op.Work == observe.Batch && end.Err == nil {
			o.m.batch.Record(ctx, end.Rows)
		}
	}
}

// Event implements observe.Observer.
func (o *Observer) Event(ctx context.Context, e observe.Event) {
	pending := label{labelPending, "false"}
	if e.Pending {
		pending.Value = "true"
	}
	switch e.Kind {
	case observe.Retried:
		o.m.retries.add(ctx, e.N, labels{{labelCause, e.Name}})
		o.mark(ctx, e)
	case observe.Commit:
		if e.Name == "lost" {
			o.m.lost.add(ctx, e.N, labels{})
			o.mark(ctx, e)
			break
		}
		o.m.resolved.add(ctx, e.N, labels{{labelResolution, e.Name}})
		o.mark(ctx, e)
	case observe.LimitRefused:
		e.Name = o.limits.of(e.Name)
		o.m.refusals.add(ctx, e.N, labels{{labelLimit, e.Name}})
		o.mark(ctx, e)
	case observe.Threshold:
		e.Name = o.limits.of(e.Name)
		o.m.thresholds.add(ctx, e.N, labels{{labelLimit, e.Name}})
		o.mark(ctx, e)
	case observe.Token:
		if e.Name == "consumed" {
			o.m.consumed.add(ctx, e.N, labels{pending})
			break
		}
		o.m.refused.add(ctx, e.N, labels{{labelReason, e.Name}})
	case observe.Hold:
		o.m.holds.add(ctx, e.N, labels{{labelTransition, e.Name}, pending})
	case observe.Job:
		o.m.jobs.add(ctx, e.N, labels{{labelResult, e.Name}})
	case observe.SweepLag:
		o.m.lag.record(ctx, e.Lag, label{labelSweep, e.Name})
	case observe.SweepSkipped:
		o.m.left.add(ctx, e.N, labels{{labelSweep, e.Name}, {labelReason, "skipped"}})
	case observe.SweepFailed:
		o.m.left.add(ctx, e.N, labels{{labelSweep, e.Name}, {labelReason, "failed"}})
	case observe.Lots:
		o.m.lots.add(ctx, e.N, labels{{labelLots, e.Name}, pending})
	case observe.LotsLapsed:
		o.m.lapsed.add(ctx, e.N, labels{})
	case observe.Session:
		o.m.sessions.add(ctx, e.N, labels{{labelSession, e.Name}})
	case observe.Purged:
		o.m.purged.add(ctx, e.N, labels{{labelTable, e.Name}})
	case observe.Slice:
		o.slice(ctx, e)
	}
}

func (o *Observer) slice(ctx context.Context, e observe.Event) {
	switch e.Name {
	case "opened":
		o.m.leased.add(ctx, e.N, labels{{labelUnits, "taken"}})
		o.m.out.Add(ctx, e.N)
	case "ended":
		o.m.out.Add(ctx, -e.N)
	case "spent", "returned":
		o.m.leased.add(ctx, e.N, labels{{labelUnits, e.Name}})
	case "recalled":
		o.m.recalls.add(ctx, e.N, labels{})
	}
}

// errorType is the code of an error: the library's, the context's, or the SQLSTATE.
func (o *Observer) errorType(end observe.End) string {
	var answer *pgconn.PgError
	switch {
	case end.Err == nil:
		return ""
	case end.Code != "":
		return end.Code
	case errors.Is(end.Err, context.Canceled):
		return "canceled"
	case errors.Is(end.Err, context.DeadlineExceeded):
		return "timeout"
	case errors.As(end.Err, &answer):
		return o.errors.of(answer.Code) // a function of the program's can raise any
	}
	return semconv.ErrorTypeOther.Value.AsString()
}
