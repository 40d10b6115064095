package metered

import (
	"strings"

	"github.com/jackc/pgx/v5"
)

// GrantSQL renders the grants under which an application can make every call of
// this library but those of GrantMaintenanceSQL: EXECUTE on the functions that it
// calls and SELECT on what it reads, but no INSERT, UPDATE or DELETE. The functions run
// with their owner's rights, and none of them changes or deletes a ledger entry, or makes
// one that takes spending back or breaks its scope's chain. The application is trusted with
// what it passes: limits, notes and operation ids.
//
// Run it as the schema's owner, after Migrate, and again after each later version
// of the schema. role must exist. What River's tables need is said in River's
// documentation: SELECT, INSERT and UPDATE on river_job and USAGE on its sequence
// are enough to enqueue.
func GrantSQL(schema, role string) (string, error) {
	return grants(schema, role, []string{
		"ledger", "refund_sum", "holds", "hold_lines", "hold_events", "holds_horizon",
		"operations", "job_keys", "schema_version",
	}, []string{
		"charge", "check_charge", "usage", "credit", "refund", "lock_scopes",
		"place", "capture_holds", "release_holds", "extend_holds", "refund_holds", "expire_hold",
		"sweep_holds", "announced", "hold_json", "lock_all",
		"mint_tokens", "inspect_token", "consume_token", "revoke_token", "revoke_tokens", "replace_token",
		"claim_job_key", "find_job_key",
		"begin_command", "complete_command", "finish_command", "block_commit", "clock",
	})
}

// GrantMaintenanceSQL renders the grants for what deletes or repairs: the five
// Purge calls and budget.Ledger.RepairClock. They are for a role of its own, which a
// scheduled job uses; a role may also be given both sets of grants.
func GrantMaintenanceSQL(schema, role string) (string, error) {
	return grants(schema, role, []string{
		"ledger", "schema_version",
	}, []string{
		"purge_scope", "repair_clock", "purge_holds", "purge_tokens", "purge_job_keys", "purge_operations", "clock",
	})
}

func grants(schemaName, role string, tables, functions []string) (string, error) {
	n, err := parseSchema("schema", schemaName)
	if err != nil {
		return "", err
	}
	if role == "" || len(role) > 63 || strings.IndexByte(role, 0) >= 0 {
		return "", invalid("role", "want the name of a role, 1 to 63 bytes")
	}
	name, to := pgx.Identifier{n.String()}.Sanitize(), " to "+pgx.Identifier{role}.Sanitize()+";\n"
	var b strings.Builder
	b.WriteString("grant usage on schema " + name + to)
	b.WriteString("grant select on " + name + "." + strings.Join(tables, ", "+name+".") + to)
	// By name alone: no function of the schema is overloaded.
	b.WriteString("grant execute on function " + name + "." + strings.Join(functions, ", "+name+".") + to)
	return b.String(), nil
}
