package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/schema"
)

// streams are a command's input and outputs.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// app is shared by the commands.
type app struct {
	streams
	url, schema string
	json        bool

	configure func(*pgxpool.Config) // for tests
	started   bool                  // the command line was understood
	user      string                // the connected role, as far as it is known
	needs     need                  // of the command
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, s streams) int {
	return runApp(ctx, &app{streams: s}, args)
}

func runApp(ctx context.Context, a *app, args []string) int {
	root := a.root()
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	return a.finish(ctx, c, err)
}

const rootLong = `metered runs the schema of github.com/pgmetered/metered: budgets, holds, tokens and operations in Postgres.

The database is that of --database-url, or else of DATABASE_URL, or else of the variables that psql knows: PGHOST,
PGPORT, PGUSER, PGPASSWORD, PGDATABASE, PGSERVICE, PGSSLMODE, PGPASSFILE. A --database-url is a URL, or words such as
"host=/run/postgresql dbname=app".

Commands that only read do so in READ ONLY transactions, and most need the reporting grants alone. What writes says which
grants it needs, and is refused without them: see metered help grant.

With --json a command prints one JSON object; one that lists prints an object for each line. Progress and questions go to
the standard error. Durations are as in Go, and in days: 90s, 36h, 30d. Times are RFC 3339, or dates.`

const exitCodes = `The exit code says what came of a command:

  0    done, and nothing was found to be wrong
  1    failed: no connection, a lock that was not free in time, an error of the server
  2    the command line was not understood, or an argument is out of bounds
  3    differences were found: verify, migrate status, migrate validate
  4    refused: explain says that the charge would be, a question was not answered with yes, or pseudonymize left the
       name where something has not ended
  5    there is no such hold, operation or wallet, or the scope has no entries
  6    the role lacks a grant; the message says which
  7    the schema is missing, or older or newer than this build works with
  130  interrupted: by Ctrl-C or SIGTERM (top, serve and demo end so, with 0)

A command that was interrupted, or failed, leaves nothing half done: each of its transactions is there or not. With
--json the error is an object on the standard error: {"error": …, "code": …, "exit": …}.`

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "metered",
		Short: "Run the schema of metered from a terminal",
		Long:  rootLong,
		Example: `  export DATABASE_URL=postgres://localhost/app
  metered migrate up
  metered top
  metered help exit-codes`,
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetVersionTemplate("metered {{.Version}}\n")
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	flags := root.PersistentFlags()
	flags.StringVarP(&a.url, "database-url", "d", "",
		"the database; defaults to DATABASE_URL, and then to PGHOST and so on")
	flags.StringVar(&a.schema, "schema", "metered", "the schema that metered was installed in")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	root.AddGroup(&cobra.Group{ID: "set-up", Title: "Set up:"},
		&cobra.Group{ID: "keep", Title: "Keep in order:"},
		&cobra.Group{ID: "look", Title: "Look:"}, &cobra.Group{ID: "page", Title: "The page:"})
	for group, commands := range map[string][]*cobra.Command{
		"set-up": {a.migrateCmd(), a.grantCmd()},
		"keep": {a.verifyCmd(), a.repairClockCmd(), a.maintainCmd(), a.sweepCmd(), a.purgeCmd(),
			a.exportCmd(), a.pseudonymizeCmd(), a.notarizeCmd(), a.receiptCmd()},
		"look": {a.topCmd(), a.usageCmd(), a.seriesCmd(), a.entriesCmd(), a.feedCmd(),
			a.statementCmd(), a.walletCmd(), a.walletsCmd(), a.nearlyCmd(), a.lotsCmd(),
			a.holdsCmd(), a.holdCmd(), a.jobsCmd(),
			a.operationCmd(), a.explainCmd()},
		"page": {a.serveCmd(), a.demoCmd()},
	} {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	root.AddCommand(&cobra.Command{Use: "exit-codes", Short: "What the exit codes mean",
		Long: exitCodes})
	return root
}

// version identifies the build: the command, the library in it, and the schema that it works with.
func version() string {
	command, library := "(devel)", "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok {
		command = cmp.Or(info.Main.Version, command)
		for _, m := range info.Deps {
			if m.Path == libraryPath && m.Replace == nil {
				library = m.Version
			}
		}
	}
	return fmt.Sprintf("%s (library %s, schema version %d)", command, library,
		metered.SchemaVersion)
}

const libraryPath = "github.com/pgmetered/metered"

// does makes a command of a function.
func (a *app) does(c *cobra.Command, needs need,
	f func(ctx context.Context, args []string) error) *cobra.Command {
	c.RunE = func(c *cobra.Command, args []string) error {
		a.started, a.needs = true, needs
		if _, err := schema.Parse(a.schema); err != nil {
			return usagef("--schema: %v", err)
		}
		return f(c.Context(), args)
	}
	if c.Args == nil {
		c.Args = cobra.NoArgs
	}
	if c.ValidArgs == nil {
		c.ValidArgsFunction = cobra.NoFileCompletions // an argument is no file
	}
	for name, words := range flagWords {
		if c.Flags().Lookup(name) != nil {
			_ = c.RegisterFlagCompletionFunc(name,
				cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
		}
	}
	return c
}

// flagWords are a shell's completions of flags.
var flagWords = map[string][]string{
	"state":  {"held", "captured", "released", "expired", "returned"},
	"by":     {"hour", "day", "week", "month"},
	"tool":   {"goose", "golang-migrate", "tern", "atlas"},
	"only":   {"ledger", "holds", "leases", "tokens", "operations", "jobs"},
	"format": {"table", "csv", "json"}, "window": {"lifetime", "1h", "1d", "30d"},
}
