package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The table in README.md has a row for each figure, with its goal, but for those that only a page cites.
func TestFigures_AreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(readme), "## As measured\n")
	require.True(t, found)
	cited := []string{"series_31_1e6_vs_1e2", "batch_over_admission"}
	rows := regexp.MustCompile(`(?m)^\| ([a-z]\w+) \|[^|]*\|[^|]*\| ([^|]*) \|`).FindAllStringSubmatch(table, -1)
	goals := map[string]string{}
	for _, row := range rows {
		goals[row[1]] = row[2]
	}
	delete(goals, "figure") // the heading
	for _, f := range figures {
		require.NotEmpty(t, f.meaning, f.name)
		require.NotEmpty(t, f.unit, f.name)
		require.NotNil(t, f.measure, f.name)
		if goal, ok := goals[f.name]; ok || !slices.Contains(cited, f.name) {
			require.Equal(t, goal, f.goal.String(), f.name)
			delete(goals, f.name) // so that none is there twice
		}
	}
	require.Empty(t, goals, "in the table alone")
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
	r := result{figure{goal: atLeast(0.8)}, samples{values: []float64{8.8, 0.8, 0.4}}}
	require.Equal(t, []string{"0.8", "0.6 … 4.8", "yes"}, []string{r.value(), r.spread(), r.verdict()})
	r.values = []float64{0.79}
	require.Equal(t, "NO", r.verdict())
	r.goal = atMost(0.8)
	require.Equal(t, "yes", r.verdict())
	r.values = nil
	require.Equal(t, []string{"not run", "", "not run"}, []string{r.value(), r.spread(), r.verdict()})
}

func TestPrintMisses_ShowsWhereTheTimeOfEachMissWent(t *testing.T) {
	t.Parallel()
	where := []profile{{contender: "slow", rate: 100, backendMicros: 5}}
	var out strings.Builder
	printMisses(&out, []result{
		{figure{name: "missed", goal: atLeast(1)}, samples{values: []float64{0.5}, where: where}},
		{figure{name: "reached", goal: atLeast(1)}, samples{values: []float64{1.5}, where: where}},
		{figure{name: "skipped", goal: atLeast(1)}, samples{notRun: "why"}},
	})
	require.Contains(t, out.String(), "missed: 0.5")
	require.Contains(t, out.String(), "slow: 100/s; per op 5 µs CPU in its backends")
	require.NotContains(t, out.String(), "reached")
	require.NotContains(t, out.String(), "skipped")
}
