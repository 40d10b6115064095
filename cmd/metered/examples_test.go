package main

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// endless are the commands that go on until they are interrupted.
var endless = map[string]bool{"top": true, "serve": true, "demo": true}

// Each example of each command's help runs, and says something.
func TestExamples_RunAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := c.Budget.ConsumeFeed(t.Context(), tx, "invoices", budget.FeedOptions{}); err != nil {
			return err
		}
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "user/dan", Amount: 30, Reference: "pro", Ends: wallet.EachPeriod(budget.Per(1, budget.Month, time.UTC, time.Time{}).Period)})
		return err
	}))
	notarized(t, pool)
	execute(t, pool, `create role app; create role viewer`)
	defer execute(t, pool, `drop owned by app, viewer; drop role app, viewer`)
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Runnable() && c.Name() != "help" && c.Parent().Name() != "completion" {
			require.NotEmpty(t, c.Example, "%s has no example", c.CommandPath())
			require.NotEmpty(t, c.Long, "%s is not described", c.CommandPath())
			for example := range strings.Lines(c.Example) {
				if c.Name() == "demo" && strings.Contains(example, "--rate") && !pgtest.Long {
					continue // TestDemo_RunsALoadAndGoesWithoutATrace runs it, and it makes a server
				}
				runExample(t, pool, c.Name(), strings.TrimSpace(example))
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	root := (&app{streams: streams{strings.NewReader(""), io.Discard, io.Discard}}).root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	walk(root)
}

func runExample(t *testing.T, pool *pgxpool.Pool, name, example string) {
	words := shellWords(t, example)
	require.Equal(t, "metered", words[0], example)
	l := cli(t, pool)
	if endless[name] && !strings.Contains(example, "--count") {
		l.until = func(out string) bool { return out != "" }
	}
	if (name == "serve" || name == "demo") && !slices.Contains(words, "--listen") {
		words = append(words, "--listen", "127.0.0.1:0") // the port of the default may be in use
	}
	if i := slices.Index(words, "--after"); name == "feed" && i > 0 { // a cursor of this server
		words[i+1] = cli(t, pool).objects("feed", "--limit", "2")[1]["cursor"].(string)
	}
	r := l.exits(exitDone, words[1:]...)
	require.NotEmpty(t, r.out, example)
}

// shellWords are the words of a command line, with single and double quotes.
func shellWords(t *testing.T, text string) (words []string) {
	t.Helper()
	word, quote, inside := "", rune(0), false
	for _, r := range text {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote == 0 && (r == '\'' || r == '"'):
			quote, inside = r, true
		case quote == 0 && r == ' ':
			if inside {
				words, word, inside = append(words, word), "", false
			}
		default:
			word, inside = word+string(r), true
		}
	}
	require.Zero(t, quote, text)
	if inside {
		words = append(words, word)
	}
	return words
}
