package main

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/sumdb/note"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/notary"
)

// notarized takes down all entries.
func notarized(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	private, _, err := note.GenerateKey(rand.Reader, "ledger.example")
	require.NoError(t, err)
	signer, err := note.NewSigner(private)
	require.NoError(t, err)
	n, err := notary.New(notary.Config{})
	require.NoError(t, err)
	_, err = n.Notarize(t.Context(), pool, signer)
	require.NoError(t, err)
}

func TestNotarize_FromTheCommandLine(t *testing.T) {
	t.Parallel()
	pool, _ := shop(t)
	l := cli(t, pool)
	private, public, ok := strings.Cut(strings.TrimSpace(l.ok("notarize", "--new-key", "ledger.example")), "\n")
	require.True(t, ok)
	dir := t.TempDir()
	key, head := filepath.Join(dir, "private"), filepath.Join(dir, "head")
	require.NoError(t, os.WriteFile(key, []byte(private+"\n"+public+"\n"), 0o600)) // as it was printed
	l.exits(exitUsage, "notarize")
	l.exits(exitUsage, "notarize", "--new-key", "a b")
	l.exits(exitUsage, "notarize", "--key", filepath.Join(dir, "none"))
	require.NoError(t, os.WriteFile(head, []byte("no key"), 0o600))
	l.exits(exitUsage, "notarize", "--key", head)
	l.exits(exitUnknown, "receipt", "org/acme", "1")
	as(t, pool, metered.GrantReportingSQL).exits(exitNotGranted, "notarize", "--key", key)

	require.NoError(t, os.WriteFile(head, []byte(l.ok("notarize", "--key", key)), 0o600))
	require.EqualValues(t, 9, l.object("notarize", "--key", key)["size"])
	reports := as(t, pool, metered.GrantReportingSQL)
	require.Contains(t, reports.ok("verify", "--against", head, "--key", public), "9 entries as in the head of ")
	receipt := reports.object("receipt", "org/acme", "1")
	require.Contains(t, receipt["head"], "ledger.example\n9\n")
	require.Contains(t, receipt["record"], "\n1 c 5 ")
	l.exits(exitUsage, "receipt", "org/acme", "one")
	l.exits(exitUnknown, "receipt", "org/acme", "1000")

	execute(t, pool, "delete from metered.ledger where scope = 'org/globex'")
	require.Contains(t, reports.exits(exitDifferences, "verify", "--against", head, "--key", public).out, "the scope was removed")
	require.Len(t, reports.exits(exitDifferences, "verify", "--against", head, "--key", public, "--json").objects()[0]["differences"], 1)
	l.exits(exitUsage, "verify", "--against", head, "--key", "no key")
	l.exits(exitUsage, "verify", "--against", filepath.Join(dir, "none"), "--key", public)
	l.exits(exitUsage, "verify", "--against", head)
	l.exits(exitUsage, "verify", "--against", head, "--key", public, "--scope", "a")
	require.NoError(t, os.WriteFile(head, []byte("forged"), 0o600))
	l.exits(exitFailed, "verify", "--against", head, "--key", public)
}
