-- Nothing is for everybody. See metered.GrantSQL.
revoke all on all functions in schema metered from public;
