package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// killable starts a cluster whose nodes are killed.
func killable(t *testing.T) func() (*pgserver.Citus, error) {
	return func() (*pgserver.Citus, error) {
		cluster, err := pgserver.StartCitus(context.Background(), pgserver.Options{Durable: true, Settings: map[string]string{
			"fsync": "off", "citus.recover_2pc_interval": "1s", // the machine does not crash
		}})
		if err == nil {
			t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
		}
		return cluster, err
	}
}

// storm is clients on all nodes that send commands, while something happens to the nodes.
type storm struct {
	*citus
	clients map[string]*metered.Client
	ids     map[string][]string                              // by node
	send    func(ctx context.Context, node, id string) error // a command, or the same again
	replay  func(node, id string) (bool, error)              // sends a command again: it was committed
	answers map[string]error
	level   pgx.TxIsoLevel

	troubled int // commands that failed, or whose outcome was not known
}

const stormClients, stormEach = 2, 15 // on each node

// atEachLevel runs storms one after the other, each in a database of its own, on a cluster that the first one starts.
func atEachLevel(t *testing.T, start func() (*pgserver.Citus, error), storms func(c *citus, level pgx.TxIsoLevel)) {
	start = sync.OnceValues(start)
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) { storms(onCitus(t, start).migrated(), level) })
	}
}

// storm makes the clients. The ids of their commands are unique.
func (c *citus) storm(level pgx.TxIsoLevel) *storm {
	s := &storm{citus: c, clients: map[string]*metered.Client{}, ids: map[string][]string{}, answers: map[string]error{}, level: level}
	cfg := metered.Config{Config: budget.Config{LockTimeout: 15 * time.Second}, MaxAttempts: 100}
	for node, pool := range c.nodes {
		s.clients[node] = pgtest.NewClient(c.t, pool, cfg)
		for i := range stormClients * stormEach {
			s.ids[node] = append(s.ids[node], fmt.Sprint(node, "-", i))
		}
	}
	return s
}

// run sends all commands, within two minutes, and calls happen as often as this, at equal parts of them.
func (s *storm) run(times int, happen func(n int)) {
	ctx, over := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer over()
	var mu sync.Mutex
	var happening sync.RWMutex
	var wg sync.WaitGroup
	const all = 3 * stormClients * stormEach
	ended := make(chan bool, all)
	for node, ids := range s.ids {
		work := make(chan string, len(ids))
		for _, id := range ids {
			work <- id
		}
		close(work)
		for range stormClients {
			wg.Go(func() {
				for id := range work {
					within, cancel := context.WithTimeout(ctx, time.Minute)
					err := s.send(within, node, id)
					cancel()
					mu.Lock()
					s.answers[id] = err
					mu.Unlock()
					ended <- true
					if err != nil && !errors.Is(err, budget.ErrExceeded) {
						happening.RLock()
						//lint:ignore SA2001 the server restarts, and not all commands are to meet that
						happening.RUnlock()
					}
				}
			})
		}
	}
	seen := 0
	for n := range times {
		for ; seen < (n+1)*all/(times+1); seen++ {
			<-ended
		}
		func() {
			happening.Lock()
			defer happening.Unlock()
			happen(n)
		}()
	}
	wg.Wait()
	require.NoError(s.t, ctx.Err())
	for _, pool := range s.nodes {
		pool.Reset()
	}
}

// judge compares each answer with the database. effects counts the effects of a command, each at most once and all or none.
func (s *storm) judge(effects func(id string) []int) (committed int64) {
	t := s.t
	refused, failed, unknown, codes := 0, 0, 0, map[string]int{}
	for _, ids := range s.ids {
		for _, id := range ids {
			err := s.answers[id]
			all := effects(id)
			for _, n := range all {
				require.Equal(t, all[0], n, "%s (%v) has a part of its effects: %v", id, err, all)
			}
			indefinite := errors.Is(err, metered.ErrIndefinite) || errors.Is(err, budget.ErrCommitUnknown)
			switch {
			case err == nil:
				require.Equal(t, 1, all[0], "%s was acknowledged and is not there", id)
			case indefinite:
				unknown++
				require.LessOrEqual(t, all[0], 1, id)
			default:
				if refused++; !errors.Is(err, budget.ErrExceeded) {
					refused--
					failed++
				}
				require.Zero(t, all[0], "%s was not committed (%v) and is there", id, err)
			}
			if err != nil {
				codes[metered.Code(err)+"/"+sqlstate.Of(err)]++
			}
			committed += int64(all[0])
		}
	}
	s.troubled = failed + unknown
	t.Logf("%d committed, %d refused, %d failed, %d unknown: %v", committed, refused, failed, unknown, codes)
	return committed
}

// commands are of all pieces: a charge of one scope up to a limit, a token, a hold, a job and a row of the caller's.
func (s *storm) commands(limit int64) {
	secrets := map[string]string{}
	require.NoError(s.t, pgx.BeginFunc(s.t.Context(), s.owner, func(tx pgx.Tx) error {
		var mints []tokens.Mint
		var of []string
		for _, ids := range s.ids {
			for _, id := range ids {
				mints, of = append(mints, tokens.Mint{Purpose: "p", Subject: id}), append(of, id)
			}
		}
		minted, err := s.clients["coordinator"].Tokens.MintMany(s.t.Context(), tx, mints)
		for i, m := range minted {
			secrets[of[i]] = m.Token.Reveal()
		}
		return err
	}))
	s.send = func(ctx context.Context, node, id string) error {
		_, err := s.command(ctx, node, id, secrets[id], limit)
		return err
	}
	s.replay = func(node, id string) (bool, error) {
		out, err := s.command(s.t.Context(), node, id, secrets[id], limit)
		return out.Replayed, err
	}
}

func (s *storm) command(ctx context.Context, node, id, secret string, limit int64) (metered.Outcome[any], error) {
	return metered.Do(ctx, s.clients[node], metered.Command{
		ID: id, Input: 1, Isolation: s.level, Token: &metered.Redeem{Purpose: "p", Subject: id, Presented: secret},
		Charges: []budget.Charge{{Scope: "stormed", Amount: 1, Limits: []budget.Limit{{Max: limit, Window: time.Hour}}}, {Scope: "of " + id, Amount: 1}},
		Holds:   []holds.Placement{{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "seats", Amount: 1}}}},
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if _, err := tx.Exec(ctx, "insert into metered.uploads values ($1)", id); err != nil {
			return nil, err
		}
		_, err := tx.Enqueue(ctx, process{id}, &jobs.Options{Key: id})
		return nil, err
	})
}

// settled checks all commands after the storm, and sends the committed and the unknown ones once more, through the next node.
func (s *storm) settled() (committed int64) {
	t := s.t
	number := func(sql string, args ...any) int { return pgtest.Value[int](t, s.owner, sql, args...) }
	effects := func(id string) []int {
		return []int{
			number("select count(*)::int from metered.ledger where scope = $1", "of "+id),
			number("select count(*)::int from metered.uploads where name = $1", id),
			number("select count(*)::int from metered.job_keys where key = $1", id),
			number("select count(*)::int from metered.river_job where args ->> 'id' = $1", id),
			number("select count(*)::int from metered.holds where id = $1", id),
			number("select count(*)::int from metered.operations where id = $1", id),
			number("select count(*)::int from metered.tokens where subject = $1 and used > 0", id),
		}
	}
	committed = s.judge(effects)
	for node, next := range map[string]string{"coordinator": "home", "home": "other", "other": "coordinator"} {
		for _, id := range s.ids[node] {
			if there := effects(id)[0] == 1; there || errors.Is(s.answers[id], metered.ErrIndefinite) {
				replayed, err := s.replay(next, id)
				require.Equal(t, there, replayed, "%s after %v: %v", id, s.answers[id], err)
				if !there && err == nil {
					committed++
				} else if !there {
					require.ErrorIs(t, err, budget.ErrExceeded, id)
				}
			}
		}
	}
	require.EqualValues(t, committed, number("select spent::int from metered.ledger where scope = 'stormed' order by seq desc limit 1"))
	require.EqualValues(t, committed, number("select held::int from metered.ledger where scope = 'seats' order by seq desc limit 1"))
	pgtest.RequireVerified(t, s.owner, s.clients["coordinator"].Budget)
	require.NotZero(t, committed)
	return committed
}

// A node is killed with SIGKILL and started again, twice, while clients on all nodes send commands. Each answer is true.
func TestCitus_NodeKilledAmidCommands(t *testing.T) {
	t.Parallel()
	for _, node := range []string{"home", "coordinator"} {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			atEachLevel(t, killable(t), func(c *citus, level pgx.TxIsoLevel) {
				s := c.storm(level)
				s.commands(1000)
				s.run(2, func(int) { s.crash(node) })
				s.owner.Reset()
				s.recovered()
				s.settled()
			})
		})
	}
}

func (s *storm) crash(node string) {
	require.NoError(s.t, s.servers[node].Kill())
	require.NoError(s.t, s.servers[node].Restart(context.Background()))
}

// recovered waits until no node has a transaction that was prepared.
func (s *storm) recovered() {
	for node, pool := range s.nodes {
		pgtest.WaitFor(s.t, "prepared transactions of "+node+" are recovered", func() bool {
			var n int
			err := pool.QueryRow(s.t.Context(), "select count(*)::int from pg_prepared_xacts where database = current_database()").Scan(&n)
			return err == nil && n == 0
		})
	}
}

// A caller's transaction writes to two schemas on two workers. It is committed on both or on neither, whichever node is killed, and the answer to
// COMMIT is true.
func TestCitus_TwoSchemasInOneTransaction(t *testing.T) {
	t.Parallel()
	atEachLevel(t, killable(t), func(c *citus, level pgx.TxIsoLevel) { c.twoSchemas(level) })
}

func (c *citus) twoSchemas(level pgx.TxIsoLevel) {
	t, second := c.t, c.elsewhere("second")
	s := c.storm(level)
	others := map[string]*metered.Client{}
	for node, pool := range c.nodes {
		others[node] = pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{Schema: second, LockTimeout: 15 * time.Second}})
	}
	s.send = func(ctx context.Context, node, id string) error {
		return s.clients[node].RunTx(ctx, pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
			for _, c := range []*metered.Client{s.clients[node], others[node]} {
				if _, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "of " + id, Amount: 1}, budget.Charge{Scope: "stormed", Amount: 1}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	order := []string{"home", "coordinator", "other"}
	s.run(len(order), func(n int) { s.crash(order[n]) })
	s.owner.Reset()
	s.recovered()
	committed := s.judge(func(id string) (all []int) {
		for _, schema := range []string{"metered", second} {
			all = append(all, pgtest.Value[int](t, c.owner, "select count(*)::int from "+schema+".ledger where scope = $1", "of "+id))
		}
		return all
	})
	for schema, client := range map[string]*metered.Client{"metered": s.clients["home"], second: others["home"]} {
		require.EqualValues(t, committed, pgtest.Value[int64](t, c.owner, "select spent from "+schema+".ledger where scope = 'stormed' order by seq desc limit 1"))
		pgtest.RequireVerified(t, c.owner, client.Budget)
	}
}

// elsewhere makes another schema, on the worker that does not have metered.
func (c *citus) elsewhere(schema string) string {
	pgtest.Migrate(c.t, c.owner, metered.MigrateOptions{Schema: schema, River: true, RiverSchema: schema})
	home := pgtest.Value[string](c.t, c.owner, "select nodename from citus_shards where table_name = 'metered.ledger'::regclass")
	if pgtest.Value[string](c.t, c.owner, "select nodename from citus_shards where table_name = '"+schema+".ledger'::regclass") == home {
		c.move(schema, "block_writes")
	}
	return schema
}

// move moves a schema to the other worker.
func (c *citus) move(schema, mode string) {
	c.t.Helper()
	home := pgtest.Value[string](c.t, c.owner, "select nodename from citus_shards where table_name = '"+schema+".ledger'::regclass")
	for _, node := range c.cluster.At[1:] {
		if node.Host != home {
			_, err := c.owner.Exec(c.t.Context(), "select citus_schema_move($1::text::regnamespace, $2, $3, $4::citus.shard_transfer_mode)", schema, node.Host, node.Port, mode)
			require.NoError(c.t, err)
			return
		}
	}
}

// A schema is moved to the other worker and back, while clients on all nodes send commands. The limit is exact, and each answer is true.
func TestCitus_SchemaMovedAmidCommands(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"block_writes", "force_logical"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			const limit = 3 * stormClients * stormEach * 3 / 4
			atEachLevel(t, citusCluster, func(c *citus, level pgx.TxIsoLevel) {
				s := c.storm(level)
				s.commands(limit)
				s.run(2, func(int) { s.move("metered", mode) })
				require.EqualValues(c.t, limit, s.settled())
				require.Zero(c.t, s.troubled, "a command that met the switch was sent again by the library")
			})
		})
	}
}

// On a cluster random histories agree with the models.
func TestCitus_ModelsAgree(t *testing.T) {
	if _, err := citusCluster(); errors.Is(err, pgserver.ErrNoCitus) {
		t.Skip(err)
	}
	for _, node := range []string{"home", "coordinator"} {
		t.Run(node, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "go", "test", "-short", "-count=1", "-p=1",
				"-run=AgreesWithTheModel|AgreeWithTheModel(Unswept)?$|NeverExceedALimit|AddsUp", ".", "./budget", "./holds", "./leases", "./wallet")
			cmd.Dir, cmd.Env = "..", append(os.Environ(), pgtest.CitusEnv+"="+node)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
