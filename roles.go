package metered

import (
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/schema"
)

// GrantSQL renders the grants under which an application can make every call of
// this library but those of GrantMaintenanceSQL: EXECUTE on the functions that it
// calls and SELECT on what it reads, but no INSERT, UPDATE or DELETE. The functions run
// with their owner's rights, and none of them changes or deletes a ledger entry, or makes
// one that takes spending back or breaks its scope's chain. The application is trusted with
// what it passes: limits, notes and operation ids.
//
// Run it as the schema's owner, after Migrate or SchemaSQL. An upgrade gives the roles of the
// version before what they need, so that it need not be run again. role must exist. The text also
// takes the functions from everybody (PUBLIC), who has them after a restore of a dump without
// privileges, and says so by NOTICE.
//
// What River's tables need is said in River's documentation: SELECT, INSERT and UPDATE on
// river_job and USAGE on its sequence are enough to enqueue.
func GrantSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Application)
}

// GrantMaintenanceSQL renders the grants for what deletes or repairs: the five
// Purge calls and budget.Ledger.RepairClock. They are for a role of its own, which a
// scheduled job uses; a role may also be given both sets of grants.
func GrantMaintenanceSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Maintenance)
}

func grants(schemaName, role string, set schema.Role) (string, error) {
	n, err := parseSchema("schema", schemaName)
	if err != nil {
		return "", err
	}
	if role == "" || len(role) > 63 || strings.IndexByte(role, 0) >= 0 {
		return "", invalid("role", "want the name of a role, 1 to 63 bytes")
	}
	return n.GrantSQL(set, pgx.Identifier{role}.Sanitize()), nil
}
