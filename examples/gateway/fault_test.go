package main

import (
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
)

// process is a gateway of its own, which is killed and started again at the same address.
type process struct {
	t       *testing.T
	args    []string
	address string
	cmd     *exec.Cmd
}

func (p *process) start() {
	p.t.Helper()
	var rest string
	rest, p.cmd = exampletest.Start(p.t, "", "http://", append([]string{"-listen", p.address}, p.args...)...)
	p.address, _, _ = strings.Cut(rest, "/")
}

func (p *process) kill() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Kill()) // SIGKILL
	require.Error(p.t, p.cmd.Wait())
}

// Streams all at once, by three gateways. A fifth of the clients hang up, two gateways are killed in the middle of
// it, and so is Postgres. A client that did not get its whole answer sends its request again, with its key, to
// another gateway.
//
// The books agree to the unit: each request is billed once at most, for the generation that was settled, as the model
// counted it. A generation that its gateway did not live to settle is free. So the model's counts of the settled
// generations add up to the ledger at each level, and to the used credit.
func TestGateways_CutKilledAndRestartedTheModelAndTheLedgerAgree(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	streams := pgtest.Size(30, 200)
	server, pool := pgtest.Start(t, pgserver.Options{Private: true, Durable: true, TCP: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	f := newFixture(t, pool, 3*time.Second)
	f.model.pace = 5 * time.Millisecond
	f.generous()

	var gateways []*process
	for range 3 {
		p := &process{t: t, address: "127.0.0.1:0", args: []string{
			"-database", server.ConnString(), "-model", f.cfg.model, "-ttl", "4s"}}
		p.start()
		t.Cleanup(p.kill)
		gateways = append(gateways, p)
		f.bases = append(f.bases, "http://"+p.address)
	}
	const granted = 5 * dollar // requests at once never run it out
	f.grants(1 * dollar)
	f.grants(4 * dollar)

	all := make([]heard, streams)
	var clients sync.WaitGroup
	for i := range all {
		clients.Go(func() { all[i] = f.insist(i) })
	}
	// Each strike comes when so many generations have ended, however long that takes.
	for n, strike := range []func(){
		func() { gateways[0].kill(); gateways[0].start() },
		func() { require.NoError(t, server.Kill()); require.NoError(t, server.Restart(t.Context())) },
		func() { gateways[1].kill(); gateways[1].start() },
	} {
		pgtest.WaitFor(t, "generations to end", func() bool { return f.model.ended() >= streams*(n+1)/5 })
		strike()
	}
	clients.Wait()

	settled := f.requireSettled()
	var total, tokens int64
	byGeneration := map[string]completion{}
	for _, row := range settled {
		byGeneration[row.Generation] = row
		counted, _ := f.model.counted(row.Generation)
		require.Equal(t, counted, row.Usage, "the bill is the model's count")
		total += prices["large"].of(counted)
		tokens += counted.Prompt + counted.Completion
	}
	require.Len(t, byGeneration, len(settled))
	cut, lost := 0, 0
	for i, h := range all {
		row, ok := settled[id(i)]
		switch {
		case h.Finish != "":
			require.Equal(t, completion{Generation: h.Generation, Finish: h.Finish, Usage: h.Usage, Cost: h.Cost}, row, "as the client heard")
			require.EqualValues(t, h.Usage.Completion, len(strings.Fields(h.Text)))
		case ok:
			cut++
			require.Equal(t, h.Generation, row.Generation)
			require.GreaterOrEqual(t, row.Usage.Completion, int64(len(strings.Fields(h.Text))))
		default:
			lost++ // it hung up, and then its gateway was killed
		}
	}
	free := len(f.model.ids()) - len(settled)
	t.Logf("%d generations: %d settled, of them %d cut; %d of gateways that died were free; %d requests came to nothing", len(f.model.ids()), len(settled), cut, free, lost)
	require.NotZero(t, cut)
	require.NotZero(t, free, "no gateway was killed at work")

	// The ledger was compared with the settled requests, level by level. Now the credit.
	balance, err := f.wallet.Balance(t.Context(), pool, credit("acme"))
	require.NoError(t, err)
	require.Equal(t, []int64{granted - total, 0, 0}, []int64{balance.Units, balance.Held, balance.Overdrawn})
	rate := int64(0)
	for _, user := range []string{"search/ann", "search/ben", "ads/eve"} {
		spent, _ := f.spent("requests/" + strings.ReplaceAll("acme/"+user+"/laptop", "/", "%2F"))
		rate += spent
	}
	require.EqualValues(t, pgtest.Count(t, pool, "metered.holds"), rate, "each attempt is a request")
	require.GreaterOrEqual(t, rate, int64(len(f.model.ids())))
}

func id(i int) string { return fmt.Sprint("stream-", i) }

// insist sends a request to one gateway and then another, until its outcome is known. A fifth of the clients hang up.
func (f *fixture) insist(i int) (h heard) {
	hangUp := 0
	if i%5 == 0 {
		hangUp = 3 + i/5%15
	}
	secret := []string{"key-of-ann", "key-of-ben", "key-of-eve"}[i%3]
	for n, end := 0, pgtest.Patience(f.t); time.Now().Before(end); n++ {
		h = f.ask(f.bases[(i+n)%len(f.bases)], secret, id(i), fmt.Sprint("How is stream ", i, " metered?"), hangUp)
		if h.Finish != "" || h.Problem == io.EOF.Error() {
			return h
		}
		if h.Status != 0 && h.Status != http.StatusOK && h.Status != http.StatusConflict && h.Status != http.StatusServiceUnavailable {
			break
		}
		time.Sleep(200 * time.Millisecond) // not as long as Retry-After says
	}
	f.t.Errorf("stream %d: %d %s", i, h.Status, h.Problem)
	return h
}

// generous makes the limits no matter.
func (f *fixture) generous() {
	f.t.Helper()
	_, err := f.pool.Exec(f.t.Context(), `update accounts set monthly = 1e12, tokens_per_minute = 1e12 where monthly is not null or tokens_per_minute is not null;
		update accounts set requests_per_minute = 1e6 where level = 'key'`)
	require.NoError(f.t, err)
}

// ended is how many generations have ended.
func (m *model) ended() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.generations {
		if g.Finish != "" {
			n++
		}
	}
	return n
}
