-- What the build of version 1 granted.
grant usage on schema metered to $app;
grant select on metered.ledger, metered.refund_sum, metered.holds, metered.hold_lines, metered.hold_events, metered.holds_horizon, metered.operations, metered.job_keys, metered.schema_version to $app;
grant execute on function metered.charge, metered.check_charge, metered.usage, metered.credit, metered.refund, metered.lock_scopes, metered.place, metered.capture_holds, metered.release_holds, metered.extend_holds, metered.refund_holds, metered.expire_hold, metered.sweep_holds, metered.announced, metered.hold_json, metered.lock_all, metered.mint_tokens, metered.inspect_token, metered.consume_token, metered.revoke_token, metered.revoke_tokens, metered.replace_token, metered.claim_job_key, metered.find_job_key, metered.begin_command, metered.complete_command, metered.finish_command, metered.unfinished, metered.clock to $app;
grant usage on schema metered to $keeper;
grant select on metered.ledger, metered.schema_version to $keeper;
grant execute on function metered.purge_scope, metered.repair_clock, metered.purge_holds, metered.purge_tokens, metered.purge_job_keys, metered.purge_operations, metered.clock to $keeper;
