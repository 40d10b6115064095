package otelmetered_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pgmetered/metered/otelmetered"
)

// exported runs the workload once, for all tests of the exporter.
func exported(t *testing.T) map[string]map[string]map[string]bool {
	t.Helper()
	w := watch(t, otelmetered.Config{MaxNames: 1})
	newService(t, w).work()
	families, err := w.registry.Gather()
	require.NoError(t, err)
	all := map[string]map[string]map[string]bool{} // by metric and label: the values
	for _, f := range families {
		if f.GetName() == "target_info" {
			continue
		}
		labels := map[string]map[string]bool{}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if !strings.HasPrefix(l.GetName(), "otel_") {
					add(labels, l.GetName(), l.GetValue())
				}
			}
		}
		all[f.GetName()] = labels
	}
	return all
}

func add(to map[string]map[string]bool, key, value string) {
	if to[key] == nil {
		to[key] = map[string]bool{}
	}
	to[key][value] = true
}

// table reads the rows of the README that begin with code, and returns the code of each cell.
func table(t *testing.T, heading string) (rows [][][]string) {
	t.Helper()
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## "+heading+"\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		var row [][]string
		for cell := range strings.SplitSeq(strings.Trim(line, "| \n"), " |") {
			var codes []string
			for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
				codes = append(codes, m[1])
			}
			row = append(row, codes)
		}
		rows = append(rows, row)
	}
	return rows
}

func underscored(label string) string { return strings.ReplaceAll(label, ".", "_") }

// The README, the dashboard and the alerts name all metrics and labels of the real exporter, and no others.
func TestExporter_HasAllMetricsOfDocsDashboardAndAlerts(t *testing.T) {
	t.Parallel()
	all := exported(t)

	described := map[string]bool{}
	values := map[string][]string{} // by label, as the README lists them
	for _, row := range table(t, "Labels") {
		values[underscored(row[0][0])] = row[1]
	}
	for _, row := range table(t, "Metrics") {
		name := underscored(row[0][0])
		for _, suffix := range []string{"_seconds", "_total"} {
			if all[name+suffix] != nil {
				name += suffix
			}
		}
		require.Contains(t, all, name)
		require.Len(t, row, 4)
		described[name] = true
		for _, label := range row[1] {
			require.Contains(t, values, underscored(label), "has its values")
			require.Contains(t, all[name], underscored(label), "%s: the workload has no such label", name)
		}
		require.Len(t, row[1], len(all[name]), "%s has the labels %v", name, all[name])
	}
	for name, labels := range all {
		require.True(t, described[name], "%s is not in the README", name)
		for label, found := range labels {
			if slices.Contains([]string{"error_type", "db_operation_name", "metered_command", "metered_limit", "metered_consumer"}, label) {
				continue // its words are more than the README's
			}
			for value := range found {
				require.Contains(t, values[label], value, "%s of %s", label, name)
			}
		}
	}

	used := map[string]bool{}
	for where, expressions := range map[string][]string{"the dashboard": shown(t), "the alerts": watchedFor(t)} {
		for _, text := range expressions {
			for _, name := range check(t, where, text, all, values) {
				used[name] = true
			}
		}
	}
	for name := range described {
		require.True(t, used[name], "nothing shows %s", name)
	}
}

// check parses an expression and looks its names up. It returns the metrics.
func check(t *testing.T, where, text string, all map[string]map[string]map[string]bool, values map[string][]string) (metrics []string) {
	t.Helper()
	expr, err := parser.ParseExpr(text)
	require.NoError(t, err, "%s: %s", where, text)
	labels := map[string]bool{"le": true, "job": true}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		name := selector.Name
		if base := regexp.MustCompile("_(bucket|sum|count)$").ReplaceAllString(name, ""); all[name] == nil {
			name = base
		}
		require.Contains(t, all, name, "%s: %s", where, text)
		metrics = append(metrics, name)
		for label := range all[name] {
			labels[label] = true
		}
		for _, m := range selector.LabelMatchers {
			if m.Name == "__name__" || m.Name == "job" {
				continue
			}
			require.Contains(t, all[name], m.Name, "%s: %s", where, text)
			for value := range strings.SplitSeq(m.Value, "|") {
				known := all[name][m.Name][value] || slices.Contains(values[m.Name], value) || value == "" ||
					strings.HasSuffix(value, ".*") || m.Name == "error_type" && documentedCode(t, value)
				require.True(t, known, "%s: %s=%q in %s", where, m.Name, value, text)
			}
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if aggregate, ok := node.(*parser.AggregateExpr); ok {
			for _, label := range aggregate.Grouping {
				require.True(t, labels[label], "%s: %s in %s", where, label, text)
			}
		}
		return nil
	})
	return metrics
}

// documentedCode reports whether docs/http.md has the code of an error.
func documentedCode(t *testing.T, code string) bool {
	text, err := os.ReadFile("../docs/http.md")
	require.NoError(t, err)
	return strings.Contains(string(text), "`"+code+"`")
}

// shown are the expressions of the dashboard.
func shown(t *testing.T) (expressions []string) {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			ID                       int
			Type, Title, Description string
			Targets                  []struct{ Expr string }
		}
		Templating struct{ List []struct{ Name string } }
	}
	text, err := os.ReadFile("grafana/dashboard.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &dashboard))
	ids := map[int]bool{}
	for _, p := range dashboard.Panels {
		require.False(t, ids[p.ID], "panel %d is there twice", p.ID)
		ids[p.ID] = true
		require.True(t, p.Type == "row" || p.Description != "" && len(p.Targets) > 0, p.Title)
		for _, target := range p.Targets {
			expressions = append(expressions, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
		}
	}
	require.NotEmpty(t, expressions)
	return expressions
}

// watchedFor are the expressions of the alerts.
func watchedFor(t *testing.T) (expressions []string) {
	t.Helper()
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	text, err := os.ReadFile("prometheus/alerts.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, &rules))
	page, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	for _, group := range rules.Groups {
		for _, r := range group.Rules {
			if strings.Contains(string(page), "\n## Alerts\n") {
				require.Contains(t, string(page), "\n### "+r.Alert+"\n", "each alert has a remedy")
			}
			require.Equal(t, "docs/operations.md#"+strings.ToLower(r.Alert), r.Annotations["runbook"])
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			require.NotEmpty(t, r.Annotations["description"], r.Alert)
			require.Contains(t, []string{"info", "warning", "critical"}, r.Labels["severity"], r.Alert)
			expressions = append(expressions, r.Expr)
		}
	}
	require.NotEmpty(t, expressions)
	return expressions
}
