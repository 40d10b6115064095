package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// part is a function or a statement inside those that a contender sends.
type part struct {
	Kind   string  `json:"kind"` // function (its own time, without what it calls) or statement
	Name   string  `json:"name"`
	Calls  float64 `json:"calls"` // per op
	Micros float64 `json:"us"`    // per op
}

func (p part) String() string {
	return fmt.Sprintf("%6.1f µs  %s %s (%.3gx)", p.Micros, p.Kind, p.Name, p.Calls)
}

// dissect runs a contender alone and looks inside its functions (track_functions)
// and, in a second run, its statements (auto_explain, whose plans come as notices).
// Both slow it down, so this is apart from what is compared. Without the right to
// do so there are no parts.
func dissect(ctx context.Context, c contender) ([]part, error) {
	admin, err := pgx.ConnectConfig(ctx, c.site.direct())
	if err != nil {
		return nil, err
	}
	defer admin.Close(context.WithoutCancel(ctx))
	set := func(setting string) error {
		_, err := admin.Exec(ctx, "alter database "+pgx.Identifier{c.site.name}.Sanitize()+" "+setting)
		return err
	}
	defer c.site.Reset() // the pool's sessions have the settings
	defer func() { _ = set("reset all") }()

	if set("set track_functions = 'all'") != nil {
		return nil, nil
	}
	// Another contender of the same database may have been counted before.
	c.site.Reset()
	before, err := functions(ctx, admin)
	if err != nil {
		return nil, err
	}
	const ops = 1000
	if err := c.alone(ctx, ops); err != nil {
		return nil, err
	}
	after, err := functions(ctx, admin)
	if err != nil {
		return nil, err
	}
	parts := since(before, after, ops)
	for _, s := range []string{
		"set session_preload_libraries = 'auto_explain'", "set auto_explain.log_min_duration = 0",
		"set auto_explain.log_nested_statements = on", "set auto_explain.log_level = 'notice'",
	} {
		if set(s) != nil {
			return parts, nil
		}
	}
	const explained = 100
	c.site.notices.keep(true)
	defer c.site.notices.keep(false)
	if err := c.alone(ctx, explained); err != nil {
		return nil, err
	}
	return append(parts, c.site.notices.statements(explained)...), nil
}

// alone runs the op so often, in new sessions that end before it returns.
func (c contender) alone(ctx context.Context, ops int) error {
	c.site.Reset()
	if c.stock != nil {
		if _, err := c.stock(ctx, ops); err != nil {
			return err
		}
	}
	_, _, err := drive(ctx, c.op, 1, time.Minute, ops)
	c.site.Reset()
	return err
}

const functionsSQL = `
select schemaname || '.' || funcname, sum(calls)::float8, sum(self_time)::float8
from pg_stat_user_functions group by 1`

// functions are all that were called so far. It waits for the sessions to end, since
// they report then.
func functions(ctx context.Context, admin *pgx.Conn) (map[string]part, error) {
	for range 200 {
		var open bool
		err := admin.QueryRow(ctx, `select exists (select from pg_stat_activity
			where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
			and application_name <> $1)`, watchName).Scan(&open)
		if err != nil {
			return nil, err
		}
		if !open {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	rows, err := admin.Query(ctx, functionsSQL)
	if err != nil {
		return nil, err
	}
	all := map[string]part{}
	var name string
	var calls, ms float64
	_, err = pgx.ForEachRow(rows, []any{&name, &calls, &ms}, func() error {
		all[name] = part{"function", name, calls, 1000 * ms}
		return nil
	})
	return all, err
}

// since is what each function took per op between the two.
func since(before, after map[string]part, ops int) []part {
	var parts []part
	for name, p := range after {
		p.Calls = (p.Calls - before[name].Calls) / float64(ops)
		p.Micros = (p.Micros - before[name].Micros) / float64(ops)
		if p.Calls > 0 {
			parts = append(parts, p)
		}
	}
	return largest(parts, 8)
}

// largest returns the parts that take longest.
func largest(parts []part, n int) []part {
	slices.SortFunc(parts, func(a, b part) int { return cmp.Or(cmp.Compare(b.Micros, a.Micros), cmp.Compare(a.Name, b.Name)) })
	return parts[:min(n, len(parts))]
}

// notices are what a site's sessions were told, while they are kept.
type notices struct {
	mu      sync.Mutex
	kept    bool
	entries []string
}

func (n *notices) keep(kept bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.kept, n.entries = kept, nil
}

func (n *notices) add(message string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.kept {
		n.entries = append(n.entries, message)
	}
}

// callsOurs finds statements that call a function of the library. auto_explain's time
// of such a statement includes the explaining of those inside it.
var callsOurs = regexp.MustCompile(`metered"?\.\w+\(`)

// statements reads auto_explain's notices, those of innermost statements.
func (n *notices) statements(ops int) []part {
	n.mu.Lock()
	defer n.mu.Unlock()
	found := map[string]*part{}
	for _, entry := range n.entries {
		ms, text, ok := explained(entry)
		if !ok || callsOurs.MatchString(strings.ReplaceAll(text, ".clock()", "")) {
			continue
		}
		if len(text) > 100 {
			text = text[:100] + "…"
		}
		p := found[text]
		if p == nil {
			p = &part{Kind: "statement", Name: text}
			found[text] = p
		}
		p.Calls += 1 / float64(ops)
		p.Micros += 1000 * ms / float64(ops)
	}
	var parts []part
	for p := range maps.Values(found) {
		parts = append(parts, *p)
	}
	return largest(parts, 10)
}

// explained takes a notice of auto_explain apart.
func explained(notice string) (ms float64, text string, ok bool) {
	duration, rest, ok := strings.Cut(strings.TrimPrefix(notice, "duration: "), " ms  plan:\nQuery Text: ")
	if !ok {
		return 0, "", false
	}
	ms, err := strconv.ParseFloat(duration, 64)
	if err != nil {
		return 0, "", false
	}
	// The plan begins with the first line that has a cost.
	var lines []string
	for line := range strings.SplitSeq(rest, "\n") {
		if strings.Contains(line, "(cost=") {
			break
		}
		lines = append(lines, line)
	}
	text = strings.Join(strings.Fields(strings.Join(lines, " ")), " ")
	return ms, text, true
}
