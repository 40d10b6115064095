package jobs_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// noSQL panics on any use.
type noSQL struct{ pgx.Tx }

// kinded has its own text as its kind.
type kinded string

func (k kinded) Kind() string { return string(k) }

// raw is its own JSON.
type raw string

func (r raw) MarshalJSON() ([]byte, error) { return json.RawMessage(r).MarshalJSON() }

func requireInvalid(t *testing.T, err error, field string) {
	t.Helper()
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
	require.Equal(t, field, argument.Field)
	require.ErrorIs(t, err, budget.ErrArgument)
	require.Equal(t, "invalid_argument", metered.Code(err))
}

func insertOnly(t *testing.T) *river.Client[pgx.Tx] {
	client, err := river.NewClient(riverpgxv5.New(nil), &river.Config{})
	require.NoError(t, err)
	return client
}

func TestEnqueue_BadInputIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	e, err := jobs.New(insertOnly(t), jobs.Config{})
	require.NoError(t, err)
	insert := func(o river.InsertOpts) *jobs.Options { return &jobs.Options{InsertOpts: o} }
	unique := river.UniqueOpts{ByQueue: true}

	for name, c := range map[string]struct {
		field string
		args  river.JobArgs
		opts  *jobs.Options
	}{
		"no args":              {"Args", nil, nil},
		"args not JSON":        {"Args", raw("{"), nil},
		"NUL in args":          {"Args", process{"a\x00"}, nil},
		"half a pair in args":  {"Args", raw(`"\ud800"`), nil},
		"args not UTF-8":       {"Args", raw("\"\xff\""), key("k")},
		"text not UTF-8":       {"Args", process{"a\xff"}, nil},
		"number of args":       {"Args", raw(`{"n": 1e200000}`), nil},
		"empty kind":           {"Args", kinded(""), nil},
		"long kind":            {"Args", kinded(strings.Repeat("k", 128)), nil},
		"NUL in kind":          {"Args", kinded("a\x00"), nil},
		"kind not UTF-8":       {"Args", kinded("a\xff"), nil},
		"long key":             {"Options.Key", process{}, key(strings.Repeat("k", 256))},
		"NUL in key":           {"Options.Key", process{}, key("a\x00")},
		"key not UTF-8":        {"Options.Key", process{}, key("a\xff")},
		"long tenant":          {"Options.Tenant", process{}, &jobs.Options{Tenant: strings.Repeat("t", 256)}},
		"NUL in tenant":        {"Options.Tenant", process{}, &jobs.Options{Tenant: "a\x00"}},
		"tenant not UTF-8":     {"Options.Tenant", process{}, &jobs.Options{Tenant: "a\xff"}},
		"upper-case queue":     {"Options.InsertOpts.Queue", process{}, insert(river.InsertOpts{Queue: "Media"})},
		"queue of args":        {"Options.InsertOpts.Queue", routed{opts: river.InsertOpts{Queue: "a b"}}, key("k")},
		"long queue":           {"Options.InsertOpts.Queue", process{}, insert(river.InsertOpts{Queue: strings.Repeat("q", 65)})},
		"queue with newline":   {"Options.InsertOpts.Queue", process{}, insert(river.InsertOpts{Queue: "q\n"})},
		"priority 5":           {"Options.InsertOpts.Priority", process{}, insert(river.InsertOpts{Priority: 5})},
		"priority -1":          {"Options.InsertOpts.Priority", process{}, insert(river.InsertOpts{Priority: -1})},
		"attempts -1":          {"Options.InsertOpts.MaxAttempts", process{}, insert(river.InsertOpts{MaxAttempts: -1})},
		"attempts 32768":       {"Options.InsertOpts.MaxAttempts", process{}, insert(river.InsertOpts{MaxAttempts: 32768})},
		"tag with comma":       {"Options.InsertOpts.Tags", process{}, insert(river.InsertOpts{Tags: []string{"good", "a,b"}})},
		"long tag":             {"Options.InsertOpts.Tags", process{}, insert(river.InsertOpts{Tags: []string{strings.Repeat("t", 256)}})},
		"tag of args":          {"Options.InsertOpts.Tags", routed{opts: river.InsertOpts{Tags: []string{""}}}, nil},
		"metadata not JSON":    {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte("{")})},
		"metadata an array":    {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte("[]")})},
		"metadata null":        {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte("null")})},
		"NUL in metadata":      {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte(`{"a":"\\\u0000"}`)})},
		"half in metadata":     {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte(`{"a":"\udc00"}`)})},
		"metadata not UTF-8":   {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte("{\"a\":\"\xff\"}")})},
		"number in metadata":   {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte(`{"a":-1E+131072}`)})},
		"year 300000":          {"Options.InsertOpts.ScheduledAt", process{}, insert(river.InsertOpts{ScheduledAt: time.Date(300000, 1, 1, 0, 0, 0, 0, time.UTC)})},
		"year -5000":           {"Options.InsertOpts.ScheduledAt", process{}, insert(river.InsertOpts{ScheduledAt: time.Date(-5000, 1, 1, 0, 0, 0, 0, time.UTC)})},
		"year of args":         {"Options.InsertOpts.ScheduledAt", routed{opts: river.InsertOpts{ScheduledAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}}, nil},
		"metadata that's ours": {"Options.InsertOpts.Metadata", process{}, insert(river.InsertOpts{Metadata: []byte(`{"metered:key":"x"}`)})},
		"unique with key":      {"Options.InsertOpts.UniqueOpts", process{}, &jobs.Options{Key: "k", InsertOpts: river.InsertOpts{UniqueOpts: unique}}},
		"unique args with key": {"Options.InsertOpts.UniqueOpts", routed{opts: river.InsertOpts{UniqueOpts: unique}}, key("k")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := e.Enqueue(context.Background(), noSQL{}, c.args, c.opts)
			requireInvalid(t, err, c.field)
			_, err = e.EnqueueMany(context.Background(), noSQL{}, []jobs.Item{{Args: process{}}, {Args: c.args, Options: c.opts}})
			requireInvalid(t, err, "Items[1]."+c.field)
		})
	}

	_, err = e.EnqueueMany(context.Background(), noSQL{}, nil)
	requireInvalid(t, err, "Items")
	_, err = e.EnqueueMany(context.Background(), noSQL{}, make([]jobs.Item, 10_000+1))
	requireInvalid(t, err, "Items")
}

func TestEnqueue_AcceptsItemsJustWithinBounds(t *testing.T) {
	t.Parallel()
	f := open(t)
	longest := &jobs.Options{
		Key: strings.Repeat("é", 127) + "k", Tenant: strings.Repeat("t", 255),
		InsertOpts: river.InsertOpts{
			Queue: "a" + strings.Repeat("-q_q|q", 10) + "qqq", Priority: 4, MaxAttempts: 32767,
			Tags: []string{"a-b", strings.Repeat("t", 255)}, Metadata: []byte(`{"a": "\\u0000"}`),
		},
	}
	require.True(t, f.mustEnqueue(kinded(strings.Repeat("k", 127)), longest).Created)
	require.False(t, f.mustEnqueue(kinded(strings.Repeat("k", 127)), longest).Created)
	record, err := f.Find(f.ctx, f.pool, longest.InsertOpts.Queue, longest.Key)
	require.NoError(t, err)
	job := f.job(record.ID)
	require.Equal(t, longest.Key, jobs.Of(job).Key)
	require.Equal(t, longest.Tenant, jobs.Of(job).Tenant)
}

func TestNewFindPurge_BadInputIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	client := insertOnly(t)
	for _, name := range []string{"Metered", "pg_x", "a b", strings.Repeat("a", 64)} {
		_, err := jobs.New(client, jobs.Config{Schema: name})
		requireInvalid(t, err, "Config.Schema")
	}
	for _, timeout := range []time.Duration{-1, time.Microsecond, time.Hour + 1} {
		_, err := jobs.New(client, jobs.Config{LockTimeout: timeout})
		requireInvalid(t, err, "Config.LockTimeout")
	}

	e, err := jobs.New(client, jobs.Config{})
	require.NoError(t, err)
	ctx := context.Background()
	for field, call := range map[string]func() error{
		"queue": func() error { _, err := e.Find(ctx, noSQL{}, "A", "k"); return err },
		"key":   func() error { _, err := e.Find(ctx, noSQL{}, "", ""); return err },
	} {
		requireInvalid(t, call(), field)
	}
}

func TestEnqueue_WithoutTheSchemaSaysSo(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := open(t)
	other, err := jobs.New(f.client, jobs.Config{Schema: "absent"})
	require.NoError(t, err)
	_, err = other.Enqueue(f.ctx, f.begin(pgx.ReadCommitted), process{}, key("k"))
	require.ErrorIs(t, err, budget.ErrNotMigrated)
	_, err = other.Find(f.ctx, f.pool, "", "k")
	require.ErrorIs(t, err, budget.ErrNotMigrated)
}
