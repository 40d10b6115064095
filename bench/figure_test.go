package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFigures_HoldEveryGoal(t *testing.T) {
	t.Parallel()
	goals := map[string]string{
		"charge_vs_floor": ">= 0.62", "charge_bound_vs_floor": ">= 0.72", "charge_vs_counter_row": ">= 0.7",
		"charge_bound_vs_counter_row": ">= 0.85", "charge_window_1e6_vs_1e2": "<= 1.15", "charge_period_1e6_vs_1e2": "<= 1.15",
		"draw_1_lot_vs_charge": "<= 1.6", "draw_4_live_10000_ended_vs_charge": "<= 2.5", "draw_ended_lots_flat": "<= 1.2",
		"charge_scopes_1e6_vs_1e3": "<= 1.3", "charge_cold_start": "<= 1.3", "refusal_vs_charge": "<= 1",
		"command_vs_floor": ">= 0.65", "command_hot_rtt1_vs_locked_floor": ">= 0.9", "multi_scope_8_vs_1": "<= 3",
		"token_consume_vs_update": ">= 0.9", "enqueue_keyed_vs_river": ">= 0.85", "bytes_per_charge": "<= 220",
		"purge_rows_per_s_vs_delete": ">= 0.8", "refusal_flood_connections": "<= 8", "carve_two_clusters": ">= 1.8",
		"lease_hot_vs_unlocked_floor": ">= 0.7", "lease_hot_64_vs_unlocked_floor": ">= 0.7", "lease_hot_vs_direct": ">= 5",
		"lease_hot_vs_counter_row": ">= 4", "command_hot_rtt1_leased_vs_unlocked_floor": ">= 0.65", "command_hot_commit2ms_leased_vs_plain": ">= 6",
		"allow_ns_limiter": "<= 150", "allow_ns_by_name": "<= 300", "allow_ns_8_goroutines": "<= 400", "allow_db_calls_per_million": "<= 200",
		"allow_vs_redis_rate": ">= 50", "allow_vs_throttled": ">= 1", "lease_stranded": "<= 2", "lease_over_admission": "= 0",
		"batch_64_vs_single": ">= 10", "batch_512_vs_single": ">= 14", "ingest_vs_single": ">= 15",
		"charge_thresholds_vs_without": "<= 1.02", "charge_bound_thresholds_vs_without": "<= 1.02", "command_thresholds_vs_without": "<= 1.02",
		"command_observer_on_vs_off": "<= 1.02",
		"page_slowest_ms":            "<= 100",
		// Measured on request once, and out of reach of a call in PL/pgSQL: see "Without a goal" in README.md.
		"charge_hot_vs_lock_floor": "none", "command_hot_rtt1_vs_seed": "none", "command_hot_commit2ms_early_vs_plain": "none",
	}
	seen := map[string]bool{}
	for _, f := range figures {
		require.False(t, seen[f.name], "%s is there twice", f.name)
		seen[f.name] = true
		require.NotEmpty(t, f.meaning, f.name)
		require.NotEmpty(t, f.unit, f.name)
		require.NotNil(t, f.measure, f.name)
		if goal, ok := goals[f.name]; ok {
			require.Equal(t, goal, f.goal.String(), f.name)
			delete(goals, f.name)
		}
	}
	require.Empty(t, goals, "not registered")
}

func TestPick_TakesFiguresByTheirWholeName(t *testing.T) {
	t.Parallel()
	all := []figure{{name: "a"}, {name: "ab"}, {name: "c"}}
	picked, err := pick(all, "c, a")
	require.NoError(t, err)
	require.Equal(t, []string{"c", "a"}, []string{picked[0].name, picked[1].name})
	picked, err = pick(all, "")
	require.NoError(t, err)
	require.Len(t, picked, 3)
	_, err = pick(all, "a,b")
	require.ErrorContains(t, err, `"b"`)
}

func TestResult_IsTheMedianJudgedByTheGoal(t *testing.T) {
	t.Parallel()
	f := figure{name: "f", goal: atLeast(0.8)}
	met := f.result(samples{values: []float64{8.8, 0.8, 0.4}})
	require.True(t, met.Met)
	require.Equal(t, 0.8, *met.Value)
	require.InDeltaSlice(t, []float64{0.4, 0.6, 4.8, 8.8}, met.Spread, 1e-9)

	require.False(t, f.result(samples{values: []float64{0.79}}).Met)

	f.goal = atMost(0.8)
	require.True(t, f.result(samples{values: []float64{0.79}}).Met)
	require.False(t, f.result(samples{values: []float64{0.81}}).Met)
}

func TestSave_WritesEveryFigureAlsoOneThatWasNotRun(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "new")
	results := []result{
		figure{name: "run", unit: "u", meaning: "m", goal: atMost(2)}.result(samples{values: []float64{1, 3}}),
		figure{name: "skipped", unit: "u", meaning: "m", goal: atMost(2)}.result(samples{notRun: "no peer"}),
	}
	require.NoError(t, save(dir, results))
	text, err := os.ReadFile(filepath.Join(dir, resultsFile))
	require.NoError(t, err)
	var read []map[string]any
	require.NoError(t, json.Unmarshal(text, &read))
	require.Len(t, read, 2)
	for key, want := range map[string]any{"name": "run", "value": 2.0, "unit": "u", "goal": "<= 2", "met": true} {
		require.Equal(t, want, read[0][key], key)
	}
	require.Nil(t, read[1]["value"])
	require.Contains(t, read[1], "value")
	require.Equal(t, false, read[1]["met"])
	require.Equal(t, "no peer", read[1]["not_run"])
}

func TestPrintMisses_ShowsWhereTheTimeOfEachMissWent(t *testing.T) {
	t.Parallel()
	cpu := 5.0
	where := []profile{
		{Contender: "slow", Rate: 100, rates: []float64{100}, BackendMicros: &cpu},
		{Contender: "fast", Rate: 200, rates: []float64{200}, BackendMicros: &cpu},
	}
	results := []result{
		figure{name: "missed", goal: atLeast(1)}.result(samples{values: []float64{0.5}, where: where}),
		figure{name: "met", goal: atLeast(1)}.result(samples{values: []float64{1.5}, where: where}),
		figure{name: "skipped", goal: atLeast(1)}.result(samples{notRun: "why"}),
	}
	var out strings.Builder
	printMisses(&out, results)
	require.Contains(t, out.String(), "missed")
	require.Contains(t, out.String(), "slow: 100/s; per op 5 µs CPU in its backends")
	require.NotContains(t, out.String(), "met:")
	require.NotContains(t, out.String(), "skipped")
}
