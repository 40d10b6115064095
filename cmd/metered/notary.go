package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"github.com/pgmetered/metered/notary"
)

func (a *app) notarizeCmd() *cobra.Command {
	var keyFile, newKey string
	var config notary.Config
	c := &cobra.Command{
		Use:   "notarize",
		Short: "Take new entries down in the log, and print its signed head",
		Long: `Notarize takes the entries that are not in the log yet down in it, and prints the head of the log, which the private key in
--key signs. Keep the head where nobody who can write to the database can change it: verify --against compares with it
later. Run it from time to time. docs/notary.md says who can still cheat.

--new-key makes a pair of keys of that name, such as that of your ledger, prints the private one and then the public
one, and does nothing else. Keep the private one in a file, away from the database, and give the public one to whoever
checks.

It needs the schema's owner.`,
		Example: `  metered notarize --new-key ledger.example`,
	}
	flags := c.Flags()
	flags.StringVar(&keyFile, "key", "", "the file with the private key in its first line")
	flags.StringVar(&newKey, "new-key", "", "make keys of this name, and print them")
	flags.IntVar(&config.MaxEntries, "max-entries", 100_000,
		"take down so many entries in one transaction")
	c.MarkFlagsMutuallyExclusive("key", "new-key")
	c.MarkFlagsOneRequired("key", "new-key")
	return a.does(c, needOwner, func(ctx context.Context, _ []string) error {
		if newKey != "" {
			return a.newKey(newKey)
		}
		text, err := os.ReadFile(keyFile)
		if err != nil {
			return usagef("--key: %v", err)
		}
		private, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
		signer, err := note.NewSigner(private)
		if err != nil {
			return usagef("--key: %s has no private key: %v", keyFile, err)
		}
		config.Schema = a.schema
		n, err := notary.New(config)
		if err != nil {
			return err
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			head, err := n.Notarize(ctx, pool, signer)
			if err != nil {
				return err
			}
			if a.json {
				return a.print(head)
			}
			_, err = fmt.Fprint(a.out, head.Note)
			return err
		})
	})
}

func (a *app) newKey(name string) error {
	private, public, err := note.GenerateKey(rand.Reader, name)
	if err == nil {
		_, err = note.NewVerifier(public)
	}
	if err != nil {
		return usagef("--new-key: %v", err)
	}
	if a.json {
		return a.print(map[string]string{"private": private, "public": public})
	}
	fmt.Fprintf(a.out, "%s\n%s\n", private, public)
	return nil
}

func (a *app) receiptCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "receipt SCOPE SEQ",
		Short: "Print a receipt of an entry, which can be checked without the database",
		Long: `Receipt prints what shows that an entry is in the log whose head was signed last: the head, the entry's record, and the
hashes between them, as JSON. Whoever has the public key can check it offline, with the program in docs/notary.md. An
entry that is not in the log yet, or that was purged, has none: it exits with 5.`,
		Example: `  metered receipt org/acme 1`,
		Args:    cobra.ExactArgs(2),
	}
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		seq, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil {
			return usagef("%q is no number of an entry", args[1])
		}
		n, err := notary.New(notary.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := n.Receipt(ctx, tx, args[0], seq)
			if err != nil {
				return err
			}
			out := json.NewEncoder(a.out)
			out.SetEscapeHTML(false)
			return out.Encode(r)
		})
	})
}

// compare compares the ledger with a head that was kept.
func (a *app) compare(ctx context.Context, pool *pgxpool.Pool, file, key string) error {
	verifier, err := note.NewVerifier(key)
	if err != nil {
		return usagef("--key: %v", err)
	}
	head, err := os.ReadFile(file)
	if err != nil {
		return usagef("--against: %v", err)
	}
	n, err := notary.New(notary.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	r, err := n.Verify(ctx, pool, head, verifier)
	if err != nil {
		return err
	}
	if a.json {
		err = a.print(r)
	} else {
		err = a.compared(r)
	}
	if len(r.Differences) > 0 {
		return cmp.Or(err, error(found(exitDifferences)))
	}
	return err
}

func (a *app) compared(r notary.Report) error {
	t := a.table("SCOPE", "ENTRY", "DIFFERENCE")
	for _, d := range r.Differences {
		t.row(dash(d.Scope), d.Seq, d.What)
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s as in the head of %s, %s.\n",
		plural(int(r.Checked), "entry", "entries"), instant(r.Head.At),
		plural(len(r.Differences), "difference", "differences"))
	for _, also := range []struct {
		n    int64
		what string
	}{{r.Purged, "purged"}, {r.Moved, "moved to another cell"}, {r.Later, "later than the head"}} {
		if also.n > 0 {
			fmt.Fprintf(a.out, "%s %s.\n", plural(int(also.n), "entry", "entries"), also.what)
		}
	}
	if r.Renamed > 0 {
		fmt.Fprintf(a.out, "%s had another name, which was taken out.\n",
			plural(int(r.Renamed), "scope", "scopes"))
	}
	return nil
}
