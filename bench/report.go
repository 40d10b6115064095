package main

import (
	"bytes"
	"html/template"
)

// report is one page that needs no other file.
func report(about string, results []result, charts []chart) ([]byte, error) {
	var missed []result
	for _, r := range results {
		if r.Value != nil && !r.Met {
			missed = append(missed, r)
		}
	}
	var page bytes.Buffer
	err := reportPage.Execute(&page, map[string]any{
		"About": about, "Results": results, "Missed": missed, "Charts": charts,
	})
	return page.Bytes(), err
}

var reportPage = template.Must(template.New("report").Funcs(template.FuncMap{
	"value": result.value, "spread": result.spread, "verdict": result.verdict,
	"profile": profile.String, "part": part.String,
}).Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What metering costs</title>
<style>
:root { color-scheme: light dark; --line: #8884; --no: #dc2626; --yes: #15803d; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
small { color: #777; display: block; }
.NO { color: var(--no); font-weight: 600; } .yes { color: var(--yes); }
pre { overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
svg { width: 100%; max-width: 720px; height: auto; font: 12px system-ui, sans-serif; }
svg text:not([fill]) { fill: currentColor; }
svg .grid { stroke: var(--line); } svg .axis { stroke: currentColor; }
</style>
<h1>What metering costs</h1>
<p>{{.About}}.</p>
<p>Contenders run in turns; a value is the median of the rounds, and a ratio is taken in each round.
<b>floor</b>: the same writes in the same flushes without lock, check and look-up. <b>locked floor</b>: with the scope's
lock. <b>seed</b>: lock, SUM and INSERT, a statement each. <b>early</b>: the library's charge first, then the rest.
<b>metered</b>: the library.</p>
{{range .Charts}}
<h2>{{.Title}}</h2>
{{.SVG}}
{{with .Text}}<p>{{.}}</p>{{end}}
{{end}}
<h2>Figures</h2>
<table>
<tr><th>figure<th>value<th>middle half<th>goal<th>met
{{range .Results}}<tr><td><code>{{.Name}}</code><small>{{.Meaning}}{{with .Note}}<br>{{.}}{{end}}{{with .NotRun}}<br>not run: {{.}}{{end}}</small>
<td class="n">{{value .}}<small>{{.Unit}}</small><td class="n">{{spread .}}<td class="n">{{if ne .Goal "none"}}{{.Goal}}{{end}}<td class="{{verdict .}}">{{verdict .}}
{{end}}</table>
{{if .Missed}}<h2>Goals missed, and where the time went</h2>
{{range .Missed}}<h3><code>{{.Name}}</code>: {{value .}}, goal {{.Goal}}</h3>
<pre>{{.Cause}}</pre>
{{end}}{{end}}
<h2>Where the time goes</h2>
{{range .Results}}{{if .Where}}<details><summary><code>{{.Name}}</code></summary><pre>{{range .Where}}{{profile .}}
{{end}}{{range .Parts}}  {{part .}}
{{end}}</pre></details>
{{end}}{{end}}
</html>
`))
