// Command metered runs the library's schema from a terminal: it migrates, grants, verifies,
// repairs, sweeps and purges, shows hot scopes and the outcomes of operations, and serves the page.
// See README.md, and metered help.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	code := run(ctx, os.Args[1:], streams{os.Stdin, os.Stdout, os.Stderr})
	stop()
	os.Exit(code)
}
