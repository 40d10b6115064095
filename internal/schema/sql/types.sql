-- The types of arguments and answers.

-- The amount of an entry, never negative: nobody can make one that takes spending back. A
-- domain, since a table's check would be parsed anew for each statement that inserts: 6
-- microseconds.
create domain metered.units as bigint check (value >= 0);

-- A role that may execute a function can pass anything. The functions that commands wait for check
-- their arguments by one condition of its own (Postgres prepares a domain's check anew in each
-- call, for 1 to 2 microseconds: a place would have 20 of them). The others use these.

-- An amount from 1 to 2^53.
create domain metered.amount as bigint not null check (value between 1 and 9007199254740992);

-- The name of a scope, 1 to 255 bytes.
create domain metered.scope_name as text collate "C" not null check (octet_length(value) between 1 and 255);

-- A fingerprint: a version byte and a SHA-256.
create domain metered.fingerprint as bytea not null check (octet_length(value) = 33);

-- A period: a number of months or days of the calendar of a zone, by its name, or without a zone a
-- number of microseconds. It is counted from the anchor; a calendar without one has the first day
-- of its months and years, and Monday.
create type metered.period as (every interval, anchor timestamptz, zone text);

-- A limit: so many units in each window of this length, or in the scope's lifetime (0), or, if win
-- is null, in each period. thresholds are reported when they are crossed, and tell_at is the lowest
-- of them (see thresholds.sql): a charge that crosses one is only made if its caller is telling.
create type metered.charge_limit as (max bigint, win interval, period metered.period,
    tell_at bigint, thresholds text, telling boolean);

-- Units of one scope that a call spends or holds. amount is how many units more count against the
-- scope's limits, and held is how many more are held; so spending grows by amount - held. Its four
-- uses: (1) a charge has held = 0, and all units are spent; (2) a placement has held > 0: the hold
-- that is being placed holds these units, and the other units of amount are spent; (3) a spend from
-- a lease has lease set: it takes the units of that lease from lease_offset on, key is the fence of
-- the lease, held is 0 and there are no limits; (4) a capture has held < 0, inside functions only:
-- -held units stop being held and are spent, and amount units beyond them are charged. With amount
-- = 0 it spends held units alone, and usage stays as it is.
--
-- key is that of the scope's lock, or null: then it is derived, which takes 20 microseconds.
-- must_exist: the scope is one of resources, and not retired.
create type metered.new_charge as (
    scope text, key bigint, amount bigint, held bigint, limits metered.charge_limit[], note jsonb,
    must_exist boolean, lease bigint, lease_offset bigint);

-- How a lease is opened: as rows (each spend is one), memory (of its owner), carved (for the child,
-- a scope) or away (the child is on another cluster). It has at least so many units (least), and at
-- most the available units divided by share.
create type metered.lease_terms as (mode text, owner text, least bigint, share int, ttl interval,
    child text);

-- The origin of an entry or a transition: the command, if it is one, and a note.
create type metered.origin as (tenant text, operation text, note jsonb);

-- Units of one scope that a capture takes, that a refund gives back, or that are captured when a
-- hold expires.
create type metered.used_units as (scope text, amount bigint, limits metered.charge_limit[]);

-- A hold to be placed. chosen: the caller chose the id, and key is that of its lock, or null: then
-- it is derived. claim is the claimed scope, if it is a claim. lifetime is how long after its
-- beginning a hold ends at the latest. minimum has the units captured of its scopes when it
-- expires. A hold up to so much, whose lines hold equal units, has a last minimum of scope '': the
-- fewest units that each of its lines may hold.
create type metered.new_hold as (
    tenant text, id text, chosen boolean, key bigint, holder text, claim text, fingerprint bytea,
    issued_at timestamptz, ttl interval, grace interval, lifetime interval, metadata json,
    minimum metered.used_units[]);

-- Holds of one tenant, and the holder that they must have ('' for any). issued are the times
-- that the ids carry.
create type metered.hold_ids as (tenant text, ids text[], issued timestamptz[], holder text);

-- A lot to be granted to a wallet. It ends at expires_at, or lasts so long after the grant, or
-- never ends. Up to roll_cap of the units that are left then roll over into a lot that lasts
-- roll_for longer (0: that never ends). Units that are refunded to it later last for late from then
-- on (0: for ever), or ends at once (null).
create type metered.new_lot as (
    amount bigint, expires_at timestamptz, lasts interval, category text, priority int,
    reference text, fingerprint bytea, roll_cap bigint, roll_for interval, late interval);

-- How a lot renews and rolls over, and what it pays for. Each period of renews has a lot of
-- renew_amount units, and renewal is the reference of the first. Units that roll over last until
-- their period of roll_to ends, or else for roll_for. They do so roll_again times more (-1:
-- always). With roll_shared the lot's roll_cap counts all units of the category that rolled over.
-- The caller sets neither renewal, roll_for nor of_reference, which is the reference of the lot
-- that had the units first. uses are in their order, and null for everything.
create type metered.lot_plan as (
    renews metered.period, renew_amount bigint, renewal text, roll_to metered.period,
    roll_for interval, roll_again int, roll_shared boolean, of_reference text, uses text[]);

-- A line of a hold of a wallet that has fallen due, or the sum of several of which each gives its
-- units back and does nothing else. Its units are those of the entry opened_seq; of a sum, that of
-- the last line.
create type metered.due_line as (
    hold bigint, due timestamptz, opened_seq bigint, units bigint, minimum bigint, id text,
    operation_tenant text, operation text, use text);

-- Units of lots that have ended, which is not written, and when they lapsed.
create type metered.unwritten as (at timestamptz, units bigint);

-- How a lot is rolled over: the lot, by its number or its reference, up to cap of its units, and
-- how long the new lot lasts (0: for ever).
create type metered.lot_rollover as (of_lot bigint, of_reference text, cap bigint, lasts interval);

-- How a capture is made. closing frees the rest and ends the holds. policy is for units beyond the
-- held ones: refuse, fit (they are charged if the limits admit them), upto (as many as the limits
-- admit are charged), even (likewise, and all scopes are cut by as many units as the one that is
-- cut most), allow (they are charged).
create type metered.capture_terms as (closing boolean, policy text, entity text);

-- A command as its first and its last statement name it. key is that of its id's lock. timeout_ms
-- bounds its transaction: 0 leaves the session's timeouts, and null all of its settings, since the
-- transaction is the caller's. standing: its receipt has the standing of its limits. leased: some
-- of its charges are spent from leases. name is the command's name, and jobs are those that it
-- made: both are for the record.
create type metered.new_command as (
    tenant text, id text, key bigint, issued_at timestamptz, max_future interval, timeout_ms int,
    marker text, standing boolean, leased boolean, name text, jobs bigint[]);

-- A token as it was presented.
create type metered.presented_token as (digest bytea, purpose text, subject text);

-- A token to be minted.
create type metered.new_token as (digest bytea, purpose text, subject text, payload json, uses int,
    ttl interval);

-- The answer of charge: an entry for each charge, in the order of the charges, the units that count
-- against each limit, the units held of each scope, the start and the end of each limit's period,
-- if there are any, and the thresholds that it crosses, or else the reason of its refusal.
create type metered.charged as (
    seqs bigint[], ats timestamptz[], used bigint[], held bigint[], refused jsonb, at timestamptz,
    periods timestamptz[], crossed jsonb);

-- A usage event, whose charge stands at the same place of another array. id is null for a charge
-- without one. id_key is that of the id's lock. issued_at is the time that the id carries, or
-- occurred_at.
create type metered.new_event as (
    tenant text, id text, id_key bigint, fingerprint bytea, issued_at timestamptz,
    occurred_at timestamptz);

-- The answer of charge_each to one charge: its number in the call, its entry, the units that count
-- against each limit before it, the held units, the limits' periods, and the thresholds that it
-- crosses, or else the reason of its refusal.
create type metered.each_answer as (
    nth int, seq bigint, at timestamptz, used bigint[], held bigint, refused jsonb, status text,
    periods timestamptz[], crossed jsonb);

-- For functions of ours. The start from which a limit was counted: the number of
-- the limit, and the entry at the beginning of its window.
create type metered.counted as (nth int, base_seq bigint, base_spent bigint);

-- For functions of ours. The hold of an entry that holds units: its id, and when
-- it falls due, from now. For a capture beyond the held units, the holds that are captured. at
-- counts as now, if the caller has read the clock under the locks.
create type metered.hold_terms as (id text, due_in interval, nos bigint[], at timestamptz);
