package metered_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgmetered/metered"
)

// A deployment looks at the schema before a new build may serve. Here somebody has run `grant execute on all
// functions` on it. Migrate takes that back, for functions alone: it leaves differences of tables and indexes to you.
func ExampleValidate() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, `grant execute on function metered.clock() to public`)
	check(err)

	report, err := metered.Validate(ctx, pool, "")
	check(err)
	switch err := report.Err(); {
	case errors.Is(err, metered.ErrSchemaDiffers):
		for _, d := range report.Differences {
			fmt.Println(d)
		}
	default: // ErrNotMigrated: migrate first; ErrSchemaVersion: this build is too old
		check(err)
	}
	repaired, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	check(err)
	fmt.Println("repaired:", repaired.Repaired[0].Object)
	report, err = metered.Validate(ctx, pool, "")
	check(err)
	fmt.Println("fit to serve:", report.OK())
	// Output:
	// function clock() can be executed by everybody
	// repaired: function clock()
	// fit to serve: true
}
