package jobs_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/jobs"
)

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	client := insertOnly(t)
	e := openGatedOn(t, client)
	none := niltest.Given{Arg: (*jobs.Options)(nil)}
	niltest.Methods(t, e, map[string][]any{
		"Enqueue": {noSQL{}, process{}, none}, "EnqueueMany": {noSQL{}, []jobs.Item{{Args: process{}}}},
		"Release": {new(pgxpool.Pool)}, "ReleaseIn": {noSQL{}, "scope"}, "Run": {new(pgxpool.Pool), niltest.Given{Arg: (func(error))(nil)}},
		"CancelParked": {noSQL{}, int64(1)}, "Reprioritize": {noSQL{}, int64(1), 1}, "Explain": {noSQL{}, int64(1)}, "Parked": {noSQL{}, "scope", int64(0), 1},
		"Find": {noSQL{}, "", "k"},
	})
	niltest.Func(t, "New", jobs.New, client, jobs.Config{})
	_, err := e.Enqueue(t.Context(), noSQL{}, (*process)(nil), nil)
	requireInvalid(t, err, "Args")
	_, err = e.EnqueueMany(t.Context(), noSQL{}, []jobs.Item{{}})
	requireInvalid(t, err, "Items[0].Args")
}
