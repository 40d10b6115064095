package notary_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/notary"
)

// An entry gets a receipt, which is checked without a database. Then somebody edits the entry.
func ExampleNotary() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	for range 3 {
		check(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 5})
			return err
		}))
	}
	private, public, err := note.GenerateKey(rand.Reader, "ledger.example") // once, for good
	check(err)
	signer, err := note.NewSigner(private)
	check(err)
	verifier, err := note.NewVerifier(public) // customers and auditors know it
	check(err)

	office, err := notary.New(notary.Config{})
	check(err)
	head, err := office.Notarize(ctx, db, signer) // from time to time. Keep head.Note elsewhere
	check(err)
	receipt, err := office.Receipt(ctx, db, "org/acme", 2)
	check(err)
	text, err := json.Marshal(receipt) // for the customer
	check(err)
	record, err := checkReceipt(text, verifier)
	check(err)
	fmt.Println(strings.Fields(record)[4:7])

	_, err = db.Exec(ctx, "update metered.ledger set amount = 6 where seq = 2")
	check(err)
	report, err := office.Verify(ctx, db, []byte(head.Note), verifier)
	check(err)
	fmt.Println(report.Checked, report.Differences)
	// Output:
	// [2 c 5]
	// 2 [{org/acme 2 the entry is not as it was}]
}

// checkReceipt returns the record that a receipt shows to be in the log of its head. It asks nobody.
func checkReceipt(receipt []byte, verifier note.Verifier) (record string, err error) {
	var r struct {
		Head, Record, Scope string
		Leaf                int64
		Proof               tlog.RecordProof
		Salt                []byte
	}
	if err := json.Unmarshal(receipt, &r); err != nil {
		return "", err
	}
	head, err := note.Open([]byte(r.Head), note.VerifierList(verifier)) // the signature
	if err != nil {
		return "", err
	}
	lines := strings.Split(head.Text, "\n") // the log's name, its size, its root, and the time
	if len(lines) < 3 || lines[0] != verifier.Name() {
		return "", errors.New("the head is of another log")
	}
	size, err := strconv.ParseInt(lines[1], 10, 64)
	if err != nil {
		return "", err
	}
	root, err := tlog.ParseHash(lines[2])
	if err != nil {
		return "", err
	}
	leaf := tlog.RecordHash([]byte(r.Record))
	if err := tlog.CheckRecord(r.Proof, size, root, r.Leaf, leaf); err != nil {
		return "", err
	}
	fields := strings.SplitN(r.Record, "\n", 3) // what it is, whose, and the numbers
	if len(fields) < 3 || fields[0] != "metered entry v1" {
		return "", errors.New("the record is of another kind")
	}
	commitment, err := base64.StdEncoding.DecodeString(fields[1])
	if err != nil {
		return "", err
	}
	name := sha256.Sum256(append(bytes.Clone(r.Salt), r.Scope...))
	if !bytes.Equal(commitment, name[:]) {
		return "", errors.New("the record is of another scope")
	}
	return r.Record, nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
