// Command render writes the whole schema, as one text, to the file that it is given.
package main

import (
	"log"
	"os"

	"github.com/pgmetered/metered/internal/schema"
)

func main() {
	if err := os.WriteFile(os.Args[1], []byte(schema.Script(schema.Current().Source())), 0o644); err != nil {
		log.Fatal(err)
	}
}
