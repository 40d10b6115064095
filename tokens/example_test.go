package tokens_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/tokens"
)

// A grant is minted, looked at when its link is opened, and consumed in the
// transaction that does the work.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := tokens.New(tokens.Config{Prefix: "acme_upload"})
	check(err)

	var minted tokens.Minted
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		minted, err = store.Mint(ctx, tx, tokens.Mint{
			Purpose: "upload", Subject: "ada", Payload: map[string]int{"asset": 42}, TTL: time.Hour})
		return err
	}))
	fmt.Println("logged:", minted.Token)
	presented := minted.Token.Reveal() // the text that ada gets by mail

	// GET: mail scanners do that too.
	info, err := store.Inspect(ctx, pool, "upload", "ada", presented)
	check(err)
	fmt.Println("uses left:", info.UsesLeft)

	// POST, twice.
	for range 2 {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			grant, err := store.Consume(ctx, tx, "upload", "ada", presented)
			if err != nil {
				return err
			}
			var asset struct{ Asset int }
			if err := grant.Decode(&asset); err != nil {
				return err
			}
			fmt.Println("uploading asset", asset.Asset)
			return nil // and the work, in tx
		})
		if errors.Is(err, tokens.ErrInvalid) {
			fmt.Println("to the client:", err)
		}
	}
	var invalid *tokens.InvalidError
	if errors.As(err, &invalid) {
		fmt.Println("to our log:", invalid.Reason())
	}

	// Output:
	// logged: acme_upload_REDACTED
	// uses left: 1
	// uploading asset 42
	// to the client: tokens: the token is not valid
	// to our log: used
}

// A typing error is refused without a query.
func ExampleStore_Parse() {
	store, err := tokens.New(tokens.Config{Prefix: "acme_upload"})
	check(err)
	for _, text := range []string{
		"acme_upload_00000b2jrHIcz9U6CURm1RYF2LoRdnTpcfa9qXNafI52jzSl2",
		"acme_upload_00000b2jrHIcz9U6CURm1RYF2LoRdnTpcfa9qXNafI52jzSI2", // l read as I
	} {
		token, err := store.Parse(text)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(token, token.Digest())
	}

	// Output:
	// acme_upload_REDACTED 91d244ffc00d7a285931b06a8c7c3154665083572d8ac4625ee92eebec83ad33
	// tokens: the token is not valid
}

// A password reset has at most one link that works.
func ExampleStore_Replace() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := tokens.New(tokens.Config{Prefix: "acme_reset"})
	check(err)

	var links []string
	for range 2 {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			minted, err := store.Replace(ctx, tx, tokens.Mint{Purpose: "reset", Subject: "ada", TTL: 15 * time.Minute})
			if err != nil {
				return err
			}
			fmt.Println("replaced:", minted.Replaced)
			links = append(links, minted.Token.Reveal())
			return nil
		}))
	}
	for _, link := range links {
		_, err := store.Inspect(ctx, pool, "reset", "ada", link)
		fmt.Println("good:", err == nil)
	}
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { // she has signed in
		revoked, err := store.RevokeSubject(ctx, tx, "reset", "ada")
		fmt.Println("revoked:", revoked)
		return err
	}))

	// Output:
	// replaced: 0
	// replaced: 1
	// good: false
	// good: true
	// revoked: 1
}

// A command that may be run again derives its token, so that both runs return
// the same one.
func ExampleDerive() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := tokens.New(tokens.Config{Prefix: "acme_invite"})
	check(err)
	var key = []byte("\x8f\x1d\x6b\x0a\x93\xe2\x4c\x75\xb1\xf0\xa2\xd3\x5e\x67\x9c\x48\x10\x29\x38\x47\x56\xac\xbe\xdf\x0f\x1e\x2d\x3c\x4b\x5a\x69\x78") // from your secret store

	invite := func(operation string) (tokens.Token, error) {
		secret, err := tokens.Derive(key, "acme", operation)
		if err != nil {
			return tokens.Token{}, err
		}
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "invite", Subject: "bob@example.com", Secret: secret})
			if errors.Is(err, tokens.ErrExists) {
				fmt.Println("minted before")
				return nil
			}
			return err
		})
		if err != nil {
			return tokens.Token{}, err
		}
		return store.Token(secret)
	}
	first, err := invite("op-1")
	check(err)
	again, err := invite("op-1")
	check(err)
	fmt.Println("the same:", first.Digest() == again.Digest())

	// Output:
	// minted before
	// the same: true
}

// Gift cards are printed before they are sold: the maker's bytes are the secret, and a card is worth nothing until it is minted.
func ExampleNewSecret() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := tokens.New(tokens.Config{Prefix: "acme_card"})
	check(err)
	fromMaker := make([]byte, 32) // of an encrypted file
	_, _ = rand.Read(fromMaker)
	secret, err := tokens.NewSecret(fromMaker)
	check(err)
	card, err := store.Token(secret) // its text is on the card
	check(err)

	_, err = store.Inspect(ctx, pool, "gift", "shop", card.Reveal())
	fmt.Println("before it is sold:", err)
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { // the sale, with its other rows
		_, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "gift", Subject: "shop", Payload: 50, TTL: 365 * 24 * time.Hour, Secret: secret})
		return err
	}))
	info, err := store.Inspect(ctx, pool, "gift", "shop", card.Reveal())
	check(err)
	fmt.Println("after:", info.UsesLeft, "use left")

	// Output:
	// before it is sold: tokens: the token is not valid
	// after: 1 use left
}

// A token got into a log that others can read. Its prefix finds it, its checksum sets it apart from other words, and it
// is revoked.
func ExampleStore_Revoke() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	store, err := tokens.New(tokens.Config{Prefix: "acme_upload"})
	check(err)
	var minted tokens.Minted
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		minted, err = store.Mint(ctx, tx, tokens.Mint{Purpose: "upload", Subject: "ada", TTL: time.Hour})
		return err
	}))
	leaked := "GET /upload?token=" + minted.Token.Reveal() + " 200\nGET /help?about=acme_upload_tokens 200"

	found := regexp.MustCompile(`\bacme_upload_[0-9A-Za-z]+`)
	for _, text := range found.FindAllString(leaked, -1) {
		token, err := store.Parse(text)
		if err != nil {
			fmt.Println("no token:", text)
			continue
		}
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			revoked, err := store.Revoke(ctx, tx, token.Digest())
			fmt.Println(token, "was live:", revoked)
			return err
		}))
	}
	_, err = store.Inspect(ctx, pool, "upload", "ada", minted.Token.Reveal())
	fmt.Println(err)

	// Output:
	// acme_upload_REDACTED was live: true
	// no token: acme_upload_tokens
	// tokens: the token is not valid
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
