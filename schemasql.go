package metered

import "github.com/pgmetered/metered/internal/schema"

// SchemaSQL renders every table, index and function for the named schema (""
// means "metered"), for the migration tool of your choice. Run it once, in a
// transaction, as the role that is to own the data; Migrate afterwards sees its
// version and leaves it alone.
//
// The name is 1 to 63 of a-z, 0-9 and _, and starts with neither a digit nor
// "pg_". Anything else is ErrArgument.
func SchemaSQL(name string) (string, error) {
	n, err := parseSchema("schema", name)
	if err != nil {
		return "", err
	}
	return n.SQL(schema.Source()), nil
}
