package otelmetered

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"

	"github.com/riverqueue/river/rivertype"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// Middleware links a job's span and the command that enqueued it, both ways, by the job's metadata
// (MetadataTrace). Put it into the Config.Middleware of the River clients that insert, and of those
// that work. A job keeps its own trace.
func (o *Observer) Middleware() rivertype.Middleware { return &middleware{o: o} }

// MetadataTrace is the member of a job's metadata with the W3C traceparent of the span that
// enqueued it.
const MetadataTrace = "metered:traceparent"

type middleware struct{ o *Observer }

var (
	_ rivertype.JobInsertMiddleware = (*middleware)(nil)
	_ rivertype.WorkerMiddleware    = (*middleware)(nil)
)

const traceparent = "traceparent"

var w3c propagation.TraceContext

// IsMiddleware implements rivertype.Middleware.
func (*middleware) IsMiddleware() bool { return true }

// InsertMany implements rivertype.JobInsertMiddleware.
func (*middleware) InsertMany(ctx context.Context, all []*rivertype.JobInsertParams,
	insert func(context.Context) ([]*rivertype.JobInsertResult,
		error)) ([]*rivertype.JobInsertResult, error) {
	carrier := propagation.MapCarrier{}
	w3c.Inject(ctx, carrier)
	if carrier[traceparent] != "" {
		for _, p := range all {
			p.Metadata = withTrace(p.Metadata, carrier[traceparent])
		}
	}
	return insert(ctx)
}

// withTrace adds the trace to metadata, which stays as it is if it is no object.
func withTrace(metadata []byte, parent string) []byte {
	members := map[string]json.RawMessage{}
	if len(metadata) > 0 && json.Unmarshal(metadata, &members) != nil || members == nil {
		return metadata
	}
	members[MetadataTrace], _ = json.Marshal(parent) // of a string: never fails
	if all, err := json.Marshal(members); err == nil {
		return all
	}
	return metadata
}

// Work implements rivertype.WorkerMiddleware.
func (m *middleware) Work(ctx context.Context, job *rivertype.JobRow,
	work func(context.Context) error) (err error) {
	ctx, span := m.o.tracer.Start(ctx, "process "+m.o.kinds.of(job.Kind),
		trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
			river, semconv.MessagingOperationName("process"), semconv.MessagingOperationTypeProcess,
			semconv.MessagingDestinationName(job.Queue),
			semconv.MessagingMessageID(strconv.FormatInt(job.ID, 10)),
		))
	if link, ok := linkOf(ctx, job.Metadata); ok {
		span.AddLink(link)
	}
	defer func() {
		if err != nil {
			span.SetStatus(codes.Error, "the job failed")
		}
		span.End()
	}()
	return work(ctx)
}

// linkOf is the span that a job's metadata name.
func linkOf(ctx context.Context, metadata []byte) (trace.Link, bool) {
	var own struct {
		Parent string `json:"metered:traceparent"`
	}
	if !bytes.Contains(metadata, []byte(MetadataTrace)) || json.Unmarshal(metadata, &own) != nil {
		return trace.Link{}, false
	}
	of := w3c.Extract(trace.ContextWithSpanContext(ctx, trace.SpanContext{}),
		propagation.MapCarrier{traceparent: own.Parent})
	producer := trace.SpanContextFromContext(of)
	return trace.Link{SpanContext: producer}, producer.IsValid()
}
