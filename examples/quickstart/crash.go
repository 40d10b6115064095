package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// crashEnv makes this program the one that crashes. It reads the request from its standard input.
const crashEnv = "QUICKSTART_CRASH"

const crashName = "metered quickstart crash" // of its connections

type crashOrder struct {
	ConnString string
	Plans      map[string]plan
	Upload     upload
}

// runAndCrash runs the command of an upload in this process, which kills itself before the flush of the charge and
// COMMIT.
func runAndCrash(ctx context.Context) {
	err := func() error {
		var order crashOrder
		if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
			return err
		}
		config, err := pgxpool.ParseConfig(order.ConnString)
		if err != nil {
			return err
		}
		config.ConnConfig.RuntimeParams["application_name"] = crashName
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return err
		}
		a, err := newApp(pool, order.Plans)
		if err != nil {
			return err
		}
		a.written = func(ctx context.Context, tx *metered.Tx) error {
			inside, err := count(ctx, tx)
			if err != nil {
				return err
			}
			if err := json.NewEncoder(os.Stdout).Encode(inside); err != nil {
				return err
			}
			self, err := os.FindProcess(os.Getpid())
			if err != nil {
				return err
			}
			return errors.Join(self.Kill(), errors.New("still alive")) // SIGKILL: no deferred call, no goodbye
		}
		_, err = a.upload(ctx, order.Upload)
		return err
	}()
	fmt.Fprintln(os.Stderr, "quickstart: the crash did not happen:", err)
	os.Exit(1)
}

func (s *story) crash(ctx context.Context) {
	s.title("A crash between the writes and the commit")
	request := s.prepare(ctx, file{"crash.txt", []byte("sent by a process that will not live to commit it\n")})
	before := must(count(ctx, s.db.Pool))
	inside, state := s.crashElsewhere(ctx, request)
	check(s.report, "end of the process that ran the command", state, "signal: killed")
	want := before // the charge and the record of the operation are made in the flush that commits
	want.Spent, want.Rows, want.Jobs = want.Spent+1, want.Rows+1, want.Jobs+1
	check(s.report, "in its transaction a moment before", inside, want)
	s.unchanged(ctx, before)
	s.unspent(ctx, request)
	check(s.report, "the same operation again, status", must(s.client.upload(ctx, request)).status, http.StatusCreated)
}

// crashElsewhere has another process crash, and returns when its transaction is over: the rows that it had written,
// and how it ended.
func (s *story) crashElsewhere(ctx context.Context, request sent) (inside counts, state string) {
	order := must(json.Marshal(crashOrder{
		ConnString: s.db.ConnString(), Plans: s.app.plans,
		Upload: upload{request.operation, request.account, request.token, request.file.Name, request.file.Content},
	}))
	cmd := exec.CommandContext(ctx, must(os.Executable()))
	cmd.Env = append(os.Environ(), crashEnv+"=1")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(order), os.Stderr
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		ok(err)
	}
	ok(ctx.Err())
	if err := json.Unmarshal(out, &inside); err != nil {
		ok(fmt.Errorf("the process that was to crash said %q: %w", out, err))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, errors.New("the server did not notice the crash"))
	defer cancel()
	ok(poll(ctx, func() (gone bool, err error) {
		err = s.db.Pool.QueryRow(ctx, `select not exists (select from pg_stat_activity where application_name = $1
			and datname = current_database())`, crashName).Scan(&gone)
		return gone, err
	}))
	return inside, cmd.ProcessState.String()
}
