package otelmetered_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/otelmetered"
	"github.com/pgmetered/metered/tokens"
)

// watched is an observer that exports its metrics as a program would.
type watched struct {
	*testing.T
	*otelmetered.Observer
	spans    *tracetest.SpanRecorder
	registry *prometheus.Registry
}

func watch(t *testing.T, cfg otelmetered.Config) *watched {
	t.Helper()
	w := &watched{T: t, spans: tracetest.NewSpanRecorder(), registry: prometheus.NewRegistry()}
	reader, err := exporter.New(exporter.WithRegisterer(w.registry))
	require.NoError(t, err)
	cfg.MeterProvider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	cfg.TracerProvider = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.spans))
	w.Observer, err = otelmetered.New(cfg)
	require.NoError(t, err)
	return w
}

// scrape is the page that Prometheus reads.
func (w *watched) scrape() string {
	w.T.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(w.registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(w.T, 200, answer.Code, answer.Body.String())
	return answer.Body.String()
}

// value is the sum of the samples that have all these labels, in any order.
func (w *watched) value(name string, labels ...string) (sum float64, found bool) {
	w.T.Helper()
	families, err := w.registry.Gather()
	require.NoError(w.T, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	samples:
		for _, m := range f.Metric {
			own := map[string]string{}
			for _, l := range m.Label {
				own[l.GetName()] = l.GetValue()
			}
			for _, l := range labels {
				if k, v, _ := strings.Cut(l, "="); own[k] != v {
					continue samples
				}
			}
			found = true
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum, found
}

func (w *watched) requireValue(want float64, name string, labels ...string) {
	w.T.Helper()
	got, found := w.value(name, labels...)
	require.True(w.T, found, "%s%v is not exported", name, labels)
	require.Equal(w.T, want, got, "%s%v", name, labels)
}

type thumbnail struct {
	Upload int64 `json:"upload"`
}

func (thumbnail) Kind() string { return "thumbnail" }

// service is a program that uses all of the library.
type service struct {
	*testing.T
	w      *watched
	pool   *pgxpool.Pool
	wire   *pgtest.Wire
	queue  *river.Client[pgx.Tx]
	client *metered.Client
	worked chan trace.SpanContext
}

func newService(t *testing.T, w *watched) *service {
	t.Helper()
	s := &service{T: t, w: w, worked: make(chan trace.SpanContext, 10)}
	s.pool, s.wire = pgtest.Tap(t, pgtest.Open(t), nil)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[thumbnail]) error {
		s.worked <- trace.SpanContextFromContext(ctx)
		return nil
	}))
	var err error
	s.queue, err = river.NewClient(riverpgxv5.New(s.pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Middleware: []rivertype.Middleware{w.Middleware()},
		Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1}}, FetchPollInterval: 50 * time.Millisecond,
		FetchCooldown: 10 * time.Millisecond,
	})
	require.NoError(t, err)
	s.client, err = metered.New(s.pool, metered.Config{River: s.queue, Config: budget.Config{Observer: w}, MaxAttempts: 3})
	require.NoError(t, err)
	return s
}

func (s *service) mint() string {
	s.T.Helper()
	var text string
	require.NoError(s.T, pgx.BeginFunc(s.T.Context(), s.pool, func(tx pgx.Tx) error {
		m, err := s.client.Tokens.Mint(s.T.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		text = m.Token.Reveal()
		return err
	}))
	return text
}

// upload is a command that does all that a command can do.
func (s *service) upload(ctx context.Context, id, token string) error {
	_, err := metered.Do(ctx, s.client, metered.Command{
		ID: id, Name: "upload", Tenant: "ann", Input: 1, Token: &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: token},
		Charges: []budget.Charge{{Scope: "org", Amount: 6, Limits: []budget.Limit{budget.PerWindow(10, time.Hour).Named("hourly")}}},
		Holds:   []holds.Placement{{Lines: []holds.Line{{Scope: "disk", Amount: 1}}, TTL: time.Second}},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		job, err := tx.Enqueue(ctx, thumbnail{1}, &jobs.Options{Key: id})
		return job.JobID, err
	})
	return err
}

func TestObserver_TracesACommandAndItsJob(t *testing.T) {
	t.Parallel()
	w := watch(t, otelmetered.Config{})
	s := newService(t, w)
	token := s.mint()
	ctx, request := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.spans)).Tracer("app").Start(t.Context(), "request")
	require.NoError(t, s.upload(ctx, "op", token))
	request.End()
	require.NoError(t, s.queue.Start(t.Context()))
	worked := <-s.worked
	require.NoError(t, s.queue.Stop(t.Context()))

	by := map[string]sdktrace.ReadOnlySpan{}
	for _, span := range w.spans.Ended() {
		by[span.Name()] = span
	}
	parents := map[string]string{
		"metered.command upload": "request", "metered.connect": "metered.command upload", "metered.flush.begin": "metered.command upload",
		"metered.function": "metered.command upload", "send thumbnail": "metered.function", "metered.flush.complete": "metered.command upload",
	}
	for name, parent := range parents {
		require.Contains(t, by, name)
		require.Equal(t, by[parent].SpanContext().SpanID(), by[name].Parent().SpanID(), "%s is in %s", name, parent)
	}
	insert, process := by["send thumbnail"], by["process thumbnail"]
	require.Equal(t, trace.SpanKindProducer, insert.SpanKind())
	require.Equal(t, trace.SpanKindConsumer, process.SpanKind())
	require.Equal(t, process.SpanContext().SpanID(), worked.SpanID(), "the job's function runs in it")
	require.Len(t, process.Links(), 1)
	require.Equal(t, insert.SpanContext().SpanID(), process.Links()[0].SpanContext.SpanID())
	require.NotEqual(t, insert.SpanContext().TraceID(), process.SpanContext().TraceID(), "a job has a trace of its own")
	id := func(span sdktrace.ReadOnlySpan) attribute.Value {
		set := attribute.NewSet(span.Attributes()...)
		v, ok := set.Value("messaging.message.id")
		require.True(t, ok)
		return v
	}
	require.Equal(t, id(insert), id(process))
	command := attribute.NewSet(by["metered.command upload"].Attributes()...)
	for key, want := range map[attribute.Key]string{"metered.operation.id": "op", "metered.operation.tenant": "ann", "metered.outcome": "committed"} {
		got, _ := command.Value(key)
		require.Equal(t, want, got.AsString())
	}
	for _, span := range w.spans.Ended() {
		for _, a := range span.Attributes() {
			require.NotContains(t, a.Value.String(), token)
			require.NotContains(t, a.Value.String(), "org")
		}
	}
}

func TestObserver_HasNoMoreLabelsThanItsBound(t *testing.T) {
	t.Parallel()
	w := watch(t, otelmetered.Config{MaxNames: 5, NoIDs: true})
	for i := range 1000 {
		name := fmt.Sprint("customer ", i)
		ctx, end := w.Start(t.Context(), observe.Op{Work: observe.Command, Name: name, ID: name, Tenant: name})
		w.Event(ctx, observe.Event{Kind: observe.LimitRefused, Name: name, N: 1})
		w.Event(ctx, observe.Event{Kind: observe.Threshold, Name: "customer 0", N: 1, Pending: true})
		_, enqueued := w.Start(ctx, observe.Op{Work: observe.Enqueue, Name: name})
		enqueued(observe.End{})
		end(observe.End{Outcome: observe.Failed, Err: fmt.Errorf("of %s: %w", name, &pgconn.PgError{Code: fmt.Sprintf("%05d", i)})})
	}
	text := w.scrape()
	require.Equal(t, 6, strings.Count(text, "metered_refusals_total{"), "five and other")
	require.LessOrEqual(t, strings.Count(text, "metered_command_duration_seconds_count{"), 36)
	require.NotContains(t, text, "customer 999")
	w.requireValue(995, "metered_refusals_total", "metered_limit=other")
	w.requireValue(1000, "metered_thresholds_total", "metered_limit=customer 0")
	w.requireValue(995, "metered_labels_overflow_total", "metered_label=limit")
	w.requireValue(995, "metered_labels_overflow_total", "metered_label=command")
	names := map[string]bool{}
	for _, span := range w.spans.Ended() {
		names[span.Name()] = true
		for _, a := range span.Attributes() {
			require.NotContains(t, []attribute.Key{"metered.operation.id", "metered.operation.tenant"}, a.Key, "NoIDs")
		}
	}
	require.Len(t, names, 12, "names of spans, too")

	_, err := otelmetered.New(otelmetered.Config{MaxNames: 1001})
	require.ErrorContains(t, err, "MaxNames")
}

func TestObserver_ErrorsHaveATypeAndNoText(t *testing.T) {
	t.Parallel()
	w := watch(t, otelmetered.Config{})
	for want, end := range map[string]observe.End{
		"busy":     {Err: errors.New("secret"), Code: "busy"},
		"canceled": {Err: fmt.Errorf("secret: %w", context.Canceled)},
		"timeout":  {Err: fmt.Errorf("secret: %w", context.DeadlineExceeded)},
		"42P01":    {Err: &pgconn.PgError{Code: "42P01", Message: "secret"}},
		"_OTHER":   {Err: errors.New("secret")},
	} {
		_, done := w.Start(t.Context(), observe.Op{Work: observe.Flush, Name: "begin"})
		done(end)
		w.requireValue(1, "db_client_operation_duration_seconds", "error_type="+want, "db_operation_name=flush.begin", "db_system_name=postgresql")
	}
	w.requireValue(1, "metered_lock_timeouts_total", "db_operation_name=flush.begin")
	for _, span := range w.spans.Ended() {
		require.NotContains(t, fmt.Sprint(span.Attributes(), span.Events(), span.Status()), "secret")
	}
}

// BenchmarkObserver makes the observer's calls of one command with a token, a job, a charge and a hold: its cost
// apart from the database's.
func BenchmarkObserver(b *testing.B) {
	for name, sampler := range map[string]sdktrace.Sampler{"untraced": sdktrace.NeverSample(), "traced": sdktrace.AlwaysSample()} {
		b.Run(name, func(b *testing.B) {
			o, err := otelmetered.New(otelmetered.Config{
				MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader())),
				TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSampler(sampler)),
			})
			require.NoError(b, err)
			b.ReportAllocs()
			for b.Loop() {
				ctx, command := o.Start(b.Context(), observe.Op{Work: observe.Command, Name: "upload", ID: "id"})
				for _, op := range []observe.Op{
					{Work: observe.Connect}, {Work: observe.Flush, Name: "begin"}, {Work: observe.Function},
					{Work: observe.Enqueue, Name: "thumbnail"}, {Work: observe.Flush, Name: "complete"},
				} {
					_, end := o.Start(ctx, op)
					end(observe.End{})
				}
				for _, kind := range []observe.Kind{observe.Job, observe.Token, observe.Hold} {
					o.Event(ctx, observe.Event{Kind: kind, Name: "placed", N: 1})
				}
				command(observe.End{Outcome: observe.Committed, Attempts: 1, RoundTrips: 2})
			}
		})
	}
}
