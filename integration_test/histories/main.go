// Command histories is an application whose calls a test judges: it records the calls of many
// clients and their answers, while connections are cut, processes are killed and stopped, and
// callers leave. Then it looks for an order of the calls, one after the other, that explains all
// answers. Compiled with the release before, the program makes the calls that its input names,
// beside the test's own. As "migrate" it makes the schema instead.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"log"
	"os"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// numbered is a call on its way to the program, or its reply on the way back.
type numbered struct {
	N     int64
	Call  *call  `json:",omitempty"`
	Reply *reply `json:",omitempty"`
}

func main() {
	db, err := pgxpool.New(context.Background(), os.Args[2])
	if err == nil && os.Args[1] == "migrate" {
		_, err = metered.Migrate(context.Background(), db, metered.MigrateOptions{})
	} else if err == nil {
		err = serve(db)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// serve makes the calls of the standard input, all at the same time, until it ends.
func serve(db *pgxpool.Pool) error {
	a, err := newApp(db, false)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	out := json.NewEncoder(os.Stdout)
	for in := json.NewDecoder(bufio.NewReader(os.Stdin)); ; {
		var c numbered
		if in.Decode(&c) != nil {
			break
		}
		wg.Go(func() {
			r := a.perform(*c.Call)
			mu.Lock()
			defer mu.Unlock()
			if err := out.Encode(numbered{N: c.N, Reply: &r}); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	return a.lent.Close(context.Background())
}
