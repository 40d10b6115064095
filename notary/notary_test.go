package notary_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/note"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/notary"
	"github.com/pgmetered/metered/privacy"
)

// keys are a new signer, and the one who checks it.
func keys(t testing.TB) (note.Signer, note.Verifier) {
	t.Helper()
	private, public, err := note.GenerateKey(rand.Reader, "ledger.example")
	require.NoError(t, err)
	signer, err := note.NewSigner(private)
	require.NoError(t, err)
	verifier, err := note.NewVerifier(public)
	require.NoError(t, err)
	return signer, verifier
}

// office is a notary with its keys, on a database.
type office struct {
	*testing.T
	pool     *pgxpool.Pool
	ledger   *budget.Ledger
	notary   *notary.Notary
	signer   note.Signer
	verifier note.Verifier
}

func newOffice(t *testing.T, config notary.Config) *office {
	t.Helper()
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	if config.LockTimeout == 0 {
		config.LockTimeout = time.Minute
	}
	n, err := notary.New(config)
	require.NoError(t, err)
	signer, verifier := keys(t)
	return &office{t, pgtest.Open(t), ledger, n, signer, verifier}
}

func (o *office) charge(scope string, times int) {
	o.Helper()
	require.NoError(o, pgx.BeginFunc(o.Context(), o.pool, func(tx pgx.Tx) error {
		for n := range times {
			_, err := o.ledger.Charge(o.Context(), tx, budget.Charge{Scope: scope, Amount: int64(n + 1), Limits: []budget.Limit{budget.Lifetime(1_000_000)}, Note: budget.Note{Actor: "user/ann"}})
			require.NoError(o, err)
		}
		return nil
	}))
}

func (o *office) notarize() notary.Head {
	o.Helper()
	head, err := o.notary.Notarize(o.Context(), o.pool, o.signer)
	require.NoError(o, err)
	return head
}

func (o *office) verify(head notary.Head) notary.Report {
	o.Helper()
	report, err := o.notary.Verify(o.Context(), o.pool, []byte(head.Note), o.verifier)
	require.NoError(o, err)
	return report
}

func (o *office) exec(sql string, args ...any) {
	o.Helper()
	_, err := o.pool.Exec(o.Context(), sql, args...)
	require.NoError(o, err)
}

func (o *office) receipt(scope string, seq int64) notary.Receipt {
	o.Helper()
	r, err := o.notary.Receipt(o.Context(), o.pool, scope, seq)
	require.NoError(o, err)
	return r
}

func TestNotarize_TakesDownEachEntryOnce(t *testing.T) {
	t.Parallel()
	for _, most := range []int{1, 3, 7, 200, 0} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			t.Parallel()
			o := newOffice(t, notary.Config{MaxEntries: most})
			require.Zero(t, o.notarize().Size, "an empty ledger has an empty log")
			require.Empty(t, o.verify(o.notarize()).Differences)
			var heads []notary.Head
			total := 0
			for round := range 4 {
				for scope := range 5 {
					if scope%2 == round%2 || scope == 4 {
						o.charge(fmt.Sprintf("org/%d", scope), 5+scope)
						total += 5 + scope
					}
				}
				head := o.notarize()
				require.EqualValues(t, total, head.Size)
				require.Equal(t, head, o.notarize(), "nothing is new")
				heads = append(heads, head)
			}
			for _, head := range heads {
				report := o.verify(head)
				require.Empty(t, report.Differences)
				require.Equal(t, head.Size, report.Checked)
				require.EqualValues(t, int64(total)-head.Size, report.Later)
				require.Equal(t, head, withAt(report.Head, head.At))
			}
			require.Equal(t, total, pgtest.Value[int](t, o.pool, "select sum(entries)::int from metered.notary_runs"))
			for scope := range 5 {
				last := pgtest.Value[int64](t, o.pool, "select max(seq) from metered.ledger where scope = $1", fmt.Sprintf("org/%d", scope))
				for seq := range last {
					checked, err := checkReceipt(encode(t, o.receipt(fmt.Sprintf("org/%d", scope), seq+1)), o.verifier)
					require.NoError(t, err)
					require.Contains(t, checked, fmt.Sprintf("\n%d c ", seq+1))
				}
			}
		})
	}
}

func withAt(h notary.Head, at time.Time) notary.Head {
	h.At = at // the note has whole seconds
	return h
}

// Every way to change what was taken down, with the log changed too where that is not noticed at once.
func TestVerify_FindsWhatWasChanged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sql, want string }{
		"an edited amount":   {"update metered.ledger set amount = 9 where scope = 'org/b' and seq = 3", "org/b 3 the entry is not as it was"},
		"a sum":              {"update metered.ledger set spent = spent + 1 where scope = 'org/b' and seq = 12", "org/b 12 the entry is not as it was"},
		"a time":             {"update metered.ledger set at = at - interval '1 us' where scope = 'org/b' and seq = 1", "org/b 1 the entry is not as it was"},
		"a kind":             {"update metered.ledger set kind = 'd' where scope = 'org/b' and seq = 2", "org/b 2 the entry is not as it was"},
		"a cut tail":         {"delete from metered.ledger where scope = 'org/b' and seq > 10", "org/b 11 entries 11 to 12 were cut off"},
		"an entry":           {"delete from metered.ledger where scope = 'org/b' and seq = 7", "org/b 7 entries 7 to 7 were removed"},
		"the first entry":    {"delete from metered.ledger where scope = 'org/b' and seq <= 7", "org/b 1 entries 1 to 7 were removed"},
		"a removed scope":    {"delete from metered.ledger where scope = 'org/b'", "org/b 1 the scope was removed, with entries 1 to 12"},
		"all of a scope":     {"delete from metered.ledger where scope = 'org/b'; delete from metered.notary_runs where scope_no = 2; delete from metered.notary_scopes where no = 2", " 0 entries 13 to 24 of the log belong to no scope"},
		"the last scope":     {"delete from metered.ledger where scope = 'org/c'; delete from metered.notary_runs where scope_no = 3; delete from metered.notary_scopes where no = 3", " 0 entries 25 to 36 of the log belong to no scope"},
		"a name":             {"update metered.ledger set scope = 'org/x' where scope = 'org/b'; update metered.notary_scopes set scope = 'org/x' where scope = 'org/b'", "org/x 0 the scope had another name"},
		"two scopes swapped": {"update metered.notary_scopes set scope = case scope when 'org/a' then 'org/b' else 'org/a' end || '!' where scope <> 'org/c'; update metered.notary_scopes set scope = rtrim(scope, '!')", "org/a 1 the entry is not as it was"},
		"a commitment":       {"update metered.notary_scopes set commitment = sha256('x'), salt = null where scope = 'org/b'", "org/b 1 the entry is not as it was"},
		"a hash":             {"update metered.notary_hashes set hashes = set_byte(hashes, 5, 1 - get_byte(hashes, 5) % 2)", " 0 the hashes of the log are not those of the head: what follows may be as wrong as they are"},
		"a cut log":          {"update metered.notary_hashes set hashes = substr(hashes, 1, 224) where block = 1", " 0 the log has hashes of 35 entries, and the head has 36"},
		"no log":             {"truncate metered.notary_hashes", " 0 the log has hashes of 0 entries, and the head has 36"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t, notary.Config{})
			for _, scope := range []string{"org/a", "org/b", "org/c"} {
				o.charge(scope, 12)
			}
			head := o.notarize()
			require.Empty(t, o.verify(head).Differences)
			o.exec(c.sql)
			var found []string
			for _, d := range o.verify(head).Differences {
				found = append(found, fmt.Sprint(d.Scope, " ", d.Seq, " ", d.What))
			}
			require.Contains(t, found, c.want)
			if strings.HasPrefix(c.want, "org/b 3 ") {
				require.Len(t, found, 1)
			}
		})
	}
}

// A whole ledger that was made anew, with a log of its own and the right key, does not fit the head that was kept.
func TestVerify_AForgedLogDoesNotFitTheHeadThatWasKept(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{})
	o.charge("org/a", 12)
	kept := o.notarize()
	o.exec("truncate metered.notary_hashes, metered.notary_heads, metered.notary_runs, metered.notary_scopes")
	o.exec("update metered.ledger set amount = 5 where seq = 4")
	forged := o.notarize()
	require.Empty(t, o.verify(forged).Differences, "who holds the key can sign it")
	require.NotEmpty(t, o.verify(kept).Differences)

	other, verifier := keys(t)
	_, err := o.notary.Verify(t.Context(), o.pool, []byte(kept.Note), verifier)
	require.ErrorIs(t, err, notary.ErrHead)
	require.Equal(t, "head_invalid", metered.Code(err))
	_ = other
	_, err = o.notary.Verify(t.Context(), o.pool, []byte(strings.Replace(kept.Note, "\n12\n", "\n11\n", 1)), o.verifier)
	require.ErrorIs(t, err, notary.ErrHead)
}

func TestVerify_APurgeIsNoDifference(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{MaxEntries: 17})
	clock := pgtest.SetClock(t, o.pool, time.Date(2031, 5, 5, 12, 0, 0, 0, time.UTC))
	o.charge("org/a", 60)
	first := o.notarize()
	clock.Advance(48 * time.Hour)
	o.charge("org/a", 40)
	_, err := o.ledger.Purge(t.Context(), o.pool, budget.PurgeOptions{OlderThan: 24 * time.Hour})
	require.NoError(t, err)
	report := o.verify(first)
	require.Empty(t, report.Differences)
	require.Positive(t, report.Purged)
	require.Equal(t, first.Size, report.Purged+report.Checked)
	second := o.notarize()
	o.charge("org/b", 60)
	clock.Advance(96 * time.Hour)
	o.charge("org/a", 30)
	o.charge("org/b", 5)
	_, err = o.ledger.Purge(t.Context(), o.pool, budget.PurgeOptions{OlderThan: 24 * time.Hour}) // of entries that are in no log, too
	require.NoError(t, err)
	third := o.notarize()
	for _, head := range []notary.Head{first, second, third} {
		require.Empty(t, o.verify(head).Differences)
	}
	require.EqualValues(t, pgtest.Count(t, o.pool, "metered.ledger"), o.verify(third).Checked, "what was purged before is in no run")
	_, err = o.notary.Receipt(t.Context(), o.pool, "org/a", 2)
	require.ErrorIs(t, err, notary.ErrUnknown)
}

// A person's name goes, and the log stays right: nothing in it confirms the name.
func TestVerify_APersonsNameGoesAndTheLogStaysRight(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{})
	o.charge("user/ann", 5)
	o.charge("org/a", 5)
	head := o.notarize()
	before := o.receipt("user/ann", 3)
	register, err := privacy.New(privacy.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), o.pool, func(tx pgx.Tx) error {
		report, err := register.Pseudonymize(t.Context(), tx, "user/ann", "gone/1")
		require.True(t, report.Done)
		return err
	}))
	report := o.verify(head)
	require.Empty(t, report.Differences)
	require.EqualValues(t, 1, report.Renamed)
	require.EqualValues(t, 10, report.Checked)
	o.charge("gone/1", 2)
	head = o.notarize()
	require.EqualValues(t, 12, head.Size, "the alias goes on in the log")
	require.Empty(t, o.verify(head).Differences)

	after := o.receipt("gone/1", 3)
	require.Empty(t, after.Salt)
	require.Equal(t, before.Record, after.Record)
	_, err = checkReceipt(encode(t, before), o.verifier)
	require.NoError(t, err, "the person's own receipt has the name")
	require.Zero(t, pgtest.Value[int](t, o.pool, "select count(*) from metered.notary_scopes where sha256(coalesce(salt, '') || 'user/ann'::bytea) = commitment"))
}

func TestReceipt_IsWrongWhereAnythingOfItIs(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{})
	o.charge("org/a", 9)
	o.charge("org/b", 9)
	o.notarize()
	right := o.receipt("org/b", 4)
	_, err := checkReceipt(encode(t, right), o.verifier)
	require.NoError(t, err)
	for what, change := range map[string]func(r *notary.Receipt){
		"record": func(r *notary.Receipt) { r.Record = strings.Replace(r.Record, "\n4 c 4 ", "\n4 c 5 ", 1) },
		"leaf":   func(r *notary.Receipt) { r.Leaf++ },
		"proof":  func(r *notary.Receipt) { r.Proof[0][3] ^= 1 },
		"scope":  func(r *notary.Receipt) { r.Scope = "org/a" },
		"salt":   func(r *notary.Receipt) { r.Salt[0] ^= 1 },
		"head":   func(r *notary.Receipt) { r.Head = strings.Replace(r.Head, "\n18\n", "\n17\n", 1) },
	} {
		r := o.receipt("org/b", 4)
		change(&r)
		require.NotEqual(t, right, r, what)
		_, err := checkReceipt(encode(t, r), o.verifier)
		require.Error(t, err, what)
	}
	o.charge("org/b", 1)
	for _, seq := range []int64{0, 10, 11} {
		_, err := o.notary.Receipt(t.Context(), o.pool, "org/b", seq)
		require.ErrorIs(t, err, notary.ErrUnknown, "%d", seq)
	}
	o.exec("update metered.ledger set amount = 5 where scope = 'org/b' and seq = 4")
	_, err = o.notary.Receipt(t.Context(), o.pool, "org/b", 4)
	require.ErrorContains(t, err, "not as it was taken down")
}

// No charge pays for the log: no function of the schema knows its tables, and nothing hangs on the ledger.
func TestNotary_NoChargeKnowsOfTheLog(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	require.Positive(t, pgtest.Value[int](t, pool, "select count(*)::int from pg_proc where pronamespace = 'metered'::regnamespace and strpos(prosrc, 'metered.ledger') > 0"))
	require.Zero(t, pgtest.Value[int](t, pool, "select count(*)::int from pg_proc where pronamespace = 'metered'::regnamespace and strpos(prosrc, 'notary_') > 0"))
	require.Zero(t, pgtest.Value[int](t, pool, "select count(*)::int from pg_trigger where tgrelid = 'metered.ledger'::regclass"))
	require.Zero(t, pgtest.Value[int](t, pool, "select count(*)::int from pg_rewrite where ev_class = 'metered.ledger'::regclass"))
}

// Beside charges, and beside others, each entry is in the log once.
func TestNotarize_BesideChargesAndOthers(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{MaxEntries: 5})
	pgtest.AtOnce(6, func(i int) {
		for range 10 {
			if i < 4 {
				o.charge(fmt.Sprintf("org/%d", i%2), 2)
			} else {
				_, err := o.notary.Notarize(t.Context(), o.pool, o.signer)
				require.NoError(t, err)
			}
		}
	})
	head := o.notarize()
	require.EqualValues(t, 80, head.Size)
	require.Empty(t, o.verify(head).Differences)
}

func TestNotary_RolesAndArguments(t *testing.T) {
	t.Parallel()
	o := newOffice(t, notary.Config{})
	o.charge("org/a", 3)
	head := o.notarize()
	reports := pgtest.AsRole(t, o.pool, metered.GrantReportingSQL, "")
	report, err := o.notary.Verify(t.Context(), reports, []byte(head.Note), o.verifier)
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	_, err = o.notary.Receipt(t.Context(), reports, "org/a", 1)
	require.NoError(t, err)
	all := pgtest.AsRole(t, o.pool, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL, metered.GrantMaintenanceSQL, metered.GrantReportingSQL), "")
	_, err = o.notary.Notarize(t.Context(), all, o.signer)
	require.ErrorIs(t, err, budget.ErrNotGranted)
	for _, config := range []notary.Config{{MaxEntries: -1}, {MaxEntries: 1_000_001}, {LockTimeout: time.Microsecond}, {Schema: "Metered"}} {
		_, err := notary.New(config)
		require.ErrorIs(t, err, budget.ErrArgument, "%+v", config)
	}
	niltest.Methods(t, o.notary, map[string][]any{"Notarize": {o.pool, o.signer}, "Verify": {o.pool, []byte(head.Note), o.verifier}, "Receipt": {o.pool, "org/a", int64(1)}})

	busy, err := notary.New(notary.Config{LockTimeout: 20 * time.Millisecond})
	require.NoError(t, err)
	tx, err := o.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "lock table metered.notary_heads in share row exclusive mode")
	require.NoError(t, err)
	_, err = busy.Notarize(t.Context(), o.pool, o.signer)
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, tx.Rollback(t.Context()))
}

// Entries of a tenant that moved are in the old cell's log, and are taken down anew in the new one.
func TestVerify_ATenantThatMovedIsNoDifference(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	signer, verifier := keys(t)
	var clients []*metered.Client
	var offices []*notary.Notary
	for _, schema := range []string{"cell_0", "cell_1"} {
		_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{Schema: schema})
		require.NoError(t, err)
		client, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: schema, LockTimeout: time.Minute}})
		require.NoError(t, err)
		office, err := notary.New(notary.Config{Schema: schema, LockTimeout: time.Minute})
		require.NoError(t, err)
		clients, offices = append(clients, client), append(offices, office)
	}
	router, err := cells.New(clients)
	require.NoError(t, err)
	require.NoError(t, router.SetUp(ctx))
	require.NoError(t, router.Move(ctx, cells.Move{Tenant: "acme", To: 0}))
	for _, scope := range []string{"acme/uploads", "acme"} {
		require.NoError(t, router.Run(ctx, "acme", func(ctx context.Context, c *metered.Client) error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: scope, Tenant: "acme", Charges: []budget.Charge{{Scope: scope, Amount: 3}}}, nil)
			return err
		}))
	}
	old, err := offices[0].Notarize(ctx, pool, signer)
	require.NoError(t, err)
	require.EqualValues(t, 2, old.Size)
	require.NoError(t, router.Move(ctx, cells.Move{Tenant: "acme", To: 1}))
	report, err := offices[0].Verify(ctx, pool, []byte(old.Note), verifier)
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	require.EqualValues(t, 2, report.Moved)
	anew, err := offices[1].Notarize(ctx, pool, signer)
	require.NoError(t, err)
	report, err = offices[1].Verify(ctx, pool, []byte(anew.Note), verifier)
	require.NoError(t, err)
	require.EqualValues(t, 2, report.Checked)

	_, err = pool.Exec(ctx, "update cell_0.tenants set cell = 0")
	require.NoError(t, err)
	report, err = offices[0].Verify(ctx, pool, []byte(old.Note), verifier)
	require.NoError(t, err)
	require.Len(t, report.Differences, 2, "a scope is gone from the cell in which its tenant lives")
}
