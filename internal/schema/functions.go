package schema

import (
	"regexp"
	"strings"
)

// Role is a role that may execute functions of the schema.
type Role uint8

// The roles, to be combined.
const (
	Application Role = 1 << iota
	Maintenance
	Reporting
	// Jobs is for a role that has Application, too.
	Jobs
)

// Attributes that functions share.
const (
	// owned functions run with their owner's rights, under any search_path of their caller.
	owned = "security definer\nset search_path = pg_catalog, pg_temp"
	// planned functions never choose a sequential scan, and plan each statement once a session.
	planned = "set enable_seqscan = off\nset plan_cache_mode = force_generic_plan"
	// batched functions read an index in its order, and stop after a batch.
	batched = "set enable_bitmapscan = off\nset enable_sort = off"

	// interpreted functions compile nothing (jit): a sort that is switched off, and needed all the
	// same, looks dear enough for it.
	interpreted = "set jit = off"

	plain      = ""
	read       = "set search_path = pg_catalog, pg_temp\n" + planned
	write      = owned + "\n" + planned
	purgeBatch = write + "\n" + batched
	readBatch  = read + "\n" + batched
)

// Function is one that roles may execute.
type Function struct {
	Name       string
	Roles      Role
	attributes string
}

// Functions are all that a role may execute. Any other is for its owner, and for functions that run
// with their owner's rights.
var Functions = []Function{
	{"clock", Application | Maintenance | Reporting, plain},
	{"keep_memory", Application | Maintenance | Reporting, plain}, // clock calls it
	{"numbers_behind", Application | Maintenance | Reporting, write},
	{"block_commit", Application, plain},

	{"lock_scopes", Application, owned},
	{"charge", Application, write},
	{"charge_plain", Application, write},
	{"charge_total", Application, write},
	{"charge_lots", Application, write},
	{"charge_each", Application, write + "\nset enable_bitmapscan = off"},
	{"check_charge", Application | Reporting, write},
	{"usage", Application | Reporting, write},
	{"usage_at", Application | Reporting, write},
	{"usage_before", Application | Reporting, write},
	{"usage_of", Application | Reporting, write},
	{"search_entries", Application | Reporting, write},
	{"credit", Application, write},
	{"refund", Application, write},
	{"purge_scope", Maintenance, write},
	{"repair_clock", Maintenance, write},
	{"open_lease", Application, write},
	{"spend", Application, write},
	{"charge_leased", Application, write},
	{"settle_lease", Application, write},
	{"purge_leases", Maintenance, purgeBatch},
	{"carve", Application, write},
	{"end_child", Application, write},
	{"receive_child", Application, write},
	{"settle_away", Application, write},
	{"create_scopes", Application, write},
	{"retire_scopes", Application, write},

	{"grant_lot", Application, write},
	{"plan_lot", Application, write},
	{"set_lot_end", Application, write},
	{"end_renewal", Application, write},
	{"draw", Application, write},
	{"revoke_lot", Application, write},
	{"reinstate_lot", Application, write},
	{"resume_renewal", Application, write},
	{"roll_over", Application, write},
	{"begin_change", Application, write},
	{"plan_state", Application, write},
	{"note_change", Application, write},
	{"plan_overage", Application, write},
	{"sweep_lots", Application, write},
	{"sweep_wallets", Application, write},
	{"sweep_wallet", Application, write},
	{"told_lots", Application, write},
	{"wallet_balance", Application | Reporting, purgeBatch + "\n" + interpreted},

	{"place", Application, write},
	{"place_plain", Application, write},
	{"look_place", Application, write},
	{"capture_holds", Application, write},
	{"capture_holds_plain", Application, write},
	{"release_holds", Application, write},
	{"release_captured", Application, write},
	{"extend_holds", Application, write},
	{"return_holds", Application, write},
	{"catch_up", Application, write},
	{"expire_hold", Application, write},
	{"sweep_due", Application, write},
	{"sweep_scope", Application, write},
	{"sweep_holds", Application, write},
	{"announced", Application, write},
	{"due_holds", Application | Reporting, readBatch},
	{"hold_json", Application | Reporting, write},
	{"lock_all", Application, write},
	{"with_sums", Application, write},
	{"purge_holds", Maintenance, purgeBatch},

	{"mint_tokens", Application, write},
	{"inspect_token", Application, write},
	{"consume_token", Application, write},
	{"consume_token_plain", Application, write},
	{"revoke_token", Application, write},
	{"revoke_tokens", Application, write},
	{"replace_token", Application, write},
	{"purge_tokens", Maintenance, purgeBatch},

	{"claim_job_key", Application, write},
	{"claim_job_key_plain", Application, owned}, // one INSERT
	{"find_job_key", Application, read},
	{"purge_job_keys", Maintenance, purgeBatch},

	{"park_jobs", Jobs, write},
	{"rest_jobs", Jobs, write},
	{"judged_scopes", Jobs, write},
	{"release_jobs", Jobs, purgeBatch + "\n" + interpreted},
	{"next_release", Application | Reporting, readBatch},
	{"trouble_jobs", Jobs, write},
	{"drop_parked", Jobs, write},
	{"change_parked", Jobs, write},
	{"explain_parked", Application | Reporting, write},

	{"take_newest", Application, write},
	{"begin_command", Application, write},
	{"complete_command", Application, write},
	{"begin_command_plain", Application, write},
	{"complete_command_plain", Application, write},
	{"run_command_plain", Application, write},
	{"complete_command_total", Application, write},
	{"run_command_total", Application, write},
	{"run_capture_plain", Application, write},
	{"run_command", Application, write},
	{"finish_command", Application, owned},
	{"purge_operations", Maintenance, purgeBatch},
	{"open_session", Application, write},
	{"open_session_plain", Application, write},
	{"enter_tenant", Application, write},

	{"number_feed", Application | Maintenance, write + "\n" + interpreted},
	{"read_feed", Application | Reporting, write},
	{"consume_feed", Application, write},
	{"drop_feed_consumer", Application | Maintenance, write},
	{"feed_keeps", Application | Maintenance | Reporting, write},

	// SQL for programs in other languages
	{"v1_charge", Application, write},
	{"v1_check", Application | Reporting, write},
	{"v1_credit", Application, write},
	{"v1_refund", Application, write},
	{"v1_usage", Application | Reporting, write},
	{"v1_balance", Application | Reporting, write},
	{"v1_hold", Application, write},
	{"v1_capture", Application, write},
	{"v1_release", Application, write},
	{"v1_consume", Application, write},
	{"v1_claim", Application, write},
	{"v1_answer", Application, write},
	{"v1_enqueue", Jobs, write},
}

var header = regexp.MustCompile(`(?s)create function metered\.([a-z_0-9]+)\(.*?\nas `)

// withAttributes puts the attributes of Functions into their definitions.
func withAttributes(sql string) string {
	attributes := make(map[string]string, len(Functions))
	for _, f := range Functions {
		attributes[f.Name] = f.attributes
	}
	return header.ReplaceAllStringFunc(sql, func(head string) string {
		if a := attributes[header.FindStringSubmatch(head)[1]]; a != "" {
			return strings.TrimSuffix(head, "as ") + a + "\nas "
		}
		return head
	})
}
