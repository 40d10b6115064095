package otelmetered

import (
	"context"
	"errors"
	"strconv"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgmetered/metered/observe"
)

// Attributes of spans that are no labels: they are not bounded.
const (
	attributeID         = attribute.Key("metered.operation.id")
	attributeTenant     = attribute.Key("metered.operation.tenant")
	attributeAttempts   = attribute.Key("metered.attempts")
	attributeRoundTrips = attribute.Key("metered.round_trips")
	attributeRows       = attribute.Key("metered.rows")
	attributeJobs       = attribute.Key("metered.jobs")
	attributeName       = attribute.Key("metered.name")
)

// operation is the name of work with the database, as a label and in spans.
func operation(op observe.Op) string {
	if op.Work == observe.Call || op.Name == "" {
		return join(op.Name, string(op.Work))
	}
	return string(op.Work) + "." + op.Name
}

func join(name, otherwise string) string {
	if name == "" {
		return otherwise
	}
	return name
}

func spanName(op observe.Op) string {
	switch op.Work {
	case observe.Command:
		return "metered.command " + join(op.Name, "unnamed")
	case observe.Enqueue:
		return "send " + op.Name
	}
	return "metered." + operation(op)
}

func kindOf(work observe.Work) trace.SpanKind {
	switch work {
	case observe.Flush, observe.Call, observe.Batch, observe.Lease:
		return trace.SpanKindClient
	case observe.Enqueue:
		return trace.SpanKindProducer
	}
	return trace.SpanKindInternal
}

// known is the fixed part of a piece of work.
type known struct {
	span, operation string
	options         []trace.SpanStartOption
}

func describe(op observe.Op) known {
	return known{spanName(op), operation(op),
		[]trace.SpanStartOption{trace.WithSpanKind(kindOf(op.Work))}}
}

// begun are the attributes of the beginning.
func (o *Observer) begun(op observe.Op) (all []attribute.KeyValue) {
	switch kindOf(op.Work) {
	case trace.SpanKindClient:
		return append(all, semconv.DBSystemNamePostgreSQL, semconv.DBOperationName(operation(op)))
	case trace.SpanKindProducer:
		return append(all, river, semconv.MessagingOperationName("enqueue"),
			semconv.MessagingOperationTypeSend)
	}
	if op.Work == observe.Command {
		all = append(all, labelCommand.String(op.Name))
		if !o.noIDs {
			all = append(all, attributeID.String(op.ID), attributeTenant.String(op.Tenant))
		}
	}
	return all
}

// ended sets the outcome of the work. The text of an error is left out: it may have scopes and
// amounts.
func (o *Observer) ended(span trace.Span, op observe.Op, end observe.End, wrong string) {
	if wrong != "" {
		span.SetAttributes(semconv.ErrorTypeKey.String(wrong))
		var answer *pgconn.PgError
		if errors.As(end.Err, &answer) {
			span.SetAttributes(semconv.DBResponseStatusCode(answer.Code))
		}
		// A refusal and a conflict are answers of a command that works.
		if op.Work != observe.Command || end.Outcome == observe.Failed ||
			end.Outcome == observe.Indefinite {
			span.SetStatus(codes.Error, wrong)
		}
	}
	switch op.Work {
	case observe.Command:
		span.SetAttributes(labelOutcome.String(string(end.Outcome)),
			attributeAttempts.Int(end.Attempts), attributeRoundTrips.Int(end.RoundTrips))
	case observe.Sweep, observe.Purge, observe.Batch:
		span.SetAttributes(attributeRows.Int64(end.Rows))
	case observe.Enqueue:
		if len(end.Jobs) == 1 {
			span.SetAttributes(semconv.MessagingMessageID(strconv.FormatInt(end.Jobs[0], 10)))
		} else {
			span.SetAttributes(semconv.MessagingBatchMessageCount(len(end.Jobs)),
				attributeJobs.Int64Slice(end.Jobs[:min(len(end.Jobs), 100)]))
		}
	}
}

// mark puts an event into the span in which it happened.
func (o *Observer) mark(ctx context.Context, e observe.Event) {
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.AddEvent("metered."+string(e.Kind), trace.WithAttributes(attributeName.String(e.Name)))
	}
}
