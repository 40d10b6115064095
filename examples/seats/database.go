package main

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

//go:embed schema.sql
var schemaSQL string

// setUpLock is held by the process that sets the database up.
const setUpLock = 7_328_321

// setUp makes the application's tables, and a hall to try, if they are missing.
func setUp(ctx context.Context, pool *pgxpool.Pool, seats int) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock($1)`, setUpLock); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, schemaSQL); err != nil {
			return err
		}
		var filled bool
		if err := tx.QueryRow(ctx, `select exists (select from hall.organisations)`).Scan(&filled); err != nil || filled {
			return err
		}
		for _, d := range demo {
			if err := d.insert(ctx, tx, seats); err != nil {
				return err
			}
		}
		return nil
	})
}

// organisation is one to try the program with.
type organisation struct {
	name, event string
	users       []user
}

type user struct {
	name string
	role role
}

var demo = []organisation{
	{"City Theatre", "A Winter's Tale", []user{
		{"Ada (manager)", manager}, {"Bo (box office)", boxOffice},
		{"Ben", customer}, {"Cleo", customer}, {"Dan", customer},
	}},
	{"Harbour Hall", "Chamber Music on Sunday", []user{{"Eve (manager)", manager}, {"Finn", customer}, {"Gwen", customer}}},
}

// blockSeats is the size of a block: 10 rows of 10 seats.
const blockSeats = 100

var sections = []struct {
	name  string
	cents int64
}{{"Stalls left", 4500}, {"Stalls centre", 5200}, {"Stalls right", 4500}, {"Balcony left", 3000}, {"Balcony right", 3000}}

func (o organisation) insert(ctx context.Context, tx pgx.Tx, seats int) error {
	org, event := metered.NewID(), metered.NewID()
	b := &pgx.Batch{}
	b.Queue(`insert into hall.organisations values ($1, $2)`, org, o.name)
	for _, u := range o.users {
		b.Queue(`insert into hall.users values ($1, $2, $3, $4)`, metered.NewID(), org, u.name, u.role)
	}
	b.Queue(`insert into hall.events values ($1, $2, $3, $4)`, event, org, o.event, statusPublished)
	block := ""
	for i := range seats {
		no, in := i/blockSeats, i%blockSeats
		if in == 0 {
			block = metered.NewID()
			section := sections[no%len(sections)]
			if no >= len(sections) {
				section.name = fmt.Sprintf("%s %d", section.name, no/len(sections)+1)
			}
			size := min(blockSeats, seats-i)
			b.Queue(`insert into hall.blocks values ($1, $2, $3, $4, $5, $6)`, block, event, no, section.name, section.cents, size)
		}
		b.Queue(`insert into hall.seats (id, event, block, ordinal, row, number) values ($1, $2, $3, $4, $5, $6)`,
			metered.NewID(), event, block, i, string(rune('A'+in/10)), in%10+1)
	}
	return tx.SendBatch(ctx, b).Close()
}
