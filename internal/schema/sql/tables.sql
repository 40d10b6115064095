-- The versions of this schema that were installed; the last one is the greatest.
create table metered.schema_version (
    version      int primary key,       -- a version that was installed
    installed_at timestamptz not null default clock_timestamp() -- when
);

insert into metered.schema_version (version) values (2);

-- The ledger: one chain of entries per scope, seq = 1, 2, 3 and so on, never changed. Each entry
-- carries its scope's totals after it, so the state of a scope is its last entry, and the spending
-- inside a window is a difference of two entries instead of a sum over many. Wide columns first: no
-- padding between them.
create table metered.ledger (
    seq       bigint      not null,     -- 1, 2, 3 and so on in the scope, without a gap
    amount    metered.units not null, -- 0 for a clock repair and a close
    at        timestamptz not null,   -- never decreases along seq within an epoch
    spent     bigint      not null,   -- sum of charges so far, never decreases
    refunded  bigint      not null,   -- sum of refunds so far, never decreases
    credited  bigint      not null,   -- sum of credits so far, less revoked and lapsed units
    held      bigint      not null,   -- units in open holds now
    epoch     smallint    not null,   -- clock repairs so far
    kind      "char"      not null,   -- c charge, d credit (deposit), r refund, k clock repair,
                                      -- z the scope was closed: nothing new is let in; of holds: h
                                      -- held, u captured (used), l released, x expired; of lots,
                                      -- credit taken back: e lapsed (ended), v revoked, o rolled
                                      -- over; s scheduled: a lot that begins later, is withdrawn,
                                      -- or whose end was set
    scope     text collate "C" not null, -- the charged scope
    next_due  timestamptz,            -- no hold that held counts falls due before
                                      -- this, or -infinity: the scope is closed
    ref       bigint,                 -- of a refund: the seq of its charge
    hold      text,                   -- the hold's id, where the entry is about one alone
    operation_tenant text,            -- of the operation
    operation text,                     -- the operation's id, where a command made the entry
    note      jsonb,                  -- actor, tenant, correlation, reason
    anchor_at timestamptz,            -- some time in the past, for which
                                      -- anchor_spent is known, or null
    anchor_spent bigint,              -- spent at that time: it bounds the units spent since
    lots_end timestamptz,             -- no lot of the scope ends or begins before
                                      -- this, or null: the scope has no lots
    crossed jsonb,                    -- the reported thresholds, until
                                      -- they are armed again, or null
    tallied boolean,                  -- true: charges without limits may
                                      -- be rows of tallies, else null
    others bigint default 9223372036854775807,  -- seq less this are the charges so far, or null:
                                                -- 0. An entry of version 1 has the greatest number
    -- The guard: a writer that did not see the last entry collides here,
    -- whatever its isolation level, even if it never took the lock.
    primary key (scope, seq)
);

-- Finds the last entry at or before a time in two short index scans: this index holds every 16th
-- entry, the other 15 are next to it in the primary key. A full index on (scope, at) would cost a
-- third more bytes and time for each charge; bisecting seq takes 20 look-ups in a scope of a
-- million entries (measured: 105 microseconds against 19).
create index ledger_time on metered.ledger (scope, epoch, at, seq)
    where seq & 15 = 1 or kind = 'k';

-- Charges without limits of busy scopes that are not in the chain yet: see tallies.sql.
create table metered.tallies (
    at     timestamptz not null,        -- when
    amount bigint not null,             -- charged units
    scope  text collate "C" not null,   -- the charged scope
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command made the charge
    hold   text,                        -- the hold's id, where its placement made the charge
    note   jsonb,                       -- actor, tenant, correlation, reason
    primary key (scope, at)
);

-- Refunds by the charge they refund, summed in blocks of 16^level charges (level 0: one charge):
-- the refunds of all charges after some entry are at most 15 rows of each level, however many there
-- are. See ADR 1.
create table metered.refund_sum (
    block  bigint   not null,         -- charge's seq >> 4 * level
    amount bigint   not null,           -- refunded of the block's charges
    level  smallint not null,           -- a block is of 16^level charges
    scope  text collate "C" not null,   -- whose charges they are
    primary key (scope, level, block)
);

-- Scopes that were declared to exist. Only charges, credits and holds that demand it look here.
-- A row stays when its scope is retired, so that no program creates the scope again unawares.
create table metered.resources (
    created_at timestamptz not null,    -- when it was declared first
    retired_at timestamptz,             -- since when nothing new is let in, or null
    scope      text collate "C" primary key -- the name
);

-- Leases: units of a scope that are spent without its lock, until the lease is settled. A row is
-- the history of one.
create table metered.leases (
    no          bigint      generated always as identity primary key, -- the number of the lease
    opened_at   timestamptz not null,   -- when it was opened
    ends_at     timestamptz not null,   -- nothing is spent of it from here
                                        -- on, and anybody may settle it
    settled_at  timestamptz,            -- when it was settled, or null while it is open
    granted     bigint      not null,   -- units that it held
    spent       bigint,                 -- captured units of granted, once it is settled
    fence       bigint      not null,   -- the key of its lock
    opened_seq  bigint      not null,   -- the entry that holds its units
    settled_seq bigint,                 -- the last entry of its end
    mode        "char"      not null,   -- s its spends are rows, m they are in its owner's
                                        -- memory, c a child scope has it, r a child on
                                        -- another cluster has it, g the row on that cluster
    scope       text collate "C" not null, -- whose units they are
    owner       text collate "C" not null, -- the process that opened it
    settled_by  text collate "C",       -- the process that settled it: its owner, or another
    child       text collate "C",       -- the scope that its units were carved for
    home_at     timestamptz             -- of mode g: when the parent's cluster
                                        -- was known to have settled its side
);

-- A scope is carved for once.
create unique index leases_child on metered.leases (child, (mode = 'r')) where child is not null;

-- The open leases of a scope by their end, the history of a scope, and settled leases by age.
create index leases_open on metered.leases (scope, ends_at) where settled_at is null;
create index leases_due on metered.leases (ends_at) where settled_at is null;
create index leases_scope on metered.leases (scope, no);
create index leases_settled on metered.leases (settled_at) where settled_at is not null;

-- How much all open leases of a scope hold together, so that a refusal need not read them. Written
-- under the scope's lock; a scope without open leases has no row.
create table metered.lease_sum (
    granted bigint not null,            -- sum of leases.granted
    scope   text collate "C" primary key -- whose units they are
);

-- Spends from leases, written by the transactions that spend. Each takes a range of its lease, as a
-- box of the plane: its lease is one side, its units the other, exact up to 2^53. Ranges that share
-- a unit exclude each other, also where neither session sees the other's row: the second waits for
-- the first one's transaction.
create table metered.lease_spends (
    lease     bigint      not null,     -- leases.no
    at_offset bigint      not null,     -- where its range begins, from 0 on
    amount    bigint      not null,     -- how long it is
    at        timestamptz not null,     -- when
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command spent it
    note      jsonb,                    -- actor, tenant, correlation, reason
    primary key (lease, at_offset),
    constraint lease_spends_apart exclude using gist (box(point(lease, at_offset),
            point(lease, at_offset + amount - 1)) with &&)
);

-- Reservations. The units that a hold keeps of a scope are in the ledger (held) and in its
-- line. This row says who holds them, until when, and how the hold ended.
--
-- Locks are taken in one order everywhere: the scopes' advisory locks by key, then rows of holds by
-- no. Under the lock of any of its scopes a hold can only expire. That is decided once, here, by
-- the plain clock. Each line is then freed under its own scope's lock, by whoever comes.
create table metered.holds (
    no          bigint      generated always as identity primary key, -- the number of the hold,
                                                                      -- in the order of placing
    placed_at   timestamptz not null,   -- when it was placed
    deadline    timestamptz not null,   -- when it ends, unless it is extended
    due         timestamptz not null,   -- deadline and grace: its units are free from here on
    ceiling     timestamptz not null,   -- no deadline is later
    ended_at    timestamptz,            -- when it ended: due, if it expired
    issued_at   timestamptz,            -- the time that the id carries, if it does
    version     int         not null,   -- transitions so far
    state       "char"      not null,   -- h held, c captured, r released, x expired
    returned    boolean     not null default false, -- captured, and given back since
    pending     boolean     not null default true,  -- not ended, or ended by time and not announced
    tenant      text collate "C" not null, -- keeps the ids of tenants apart
    id          text collate "C" not null, -- chosen by the caller, or made up
    holder      text collate "C" not null, -- the holder, or empty for nobody
    claim       text collate "C",       -- the claimed scope, if it is a claim
    entity      text collate "C",       -- the entity that a capture linked
    fingerprint bytea       not null,   -- a version byte and a SHA-256
    keys        bigint[]    not null,   -- of the locks of its scopes, ascending
    metadata    json,                   -- of the caller
    unique (tenant, id)
);

-- The order of the sweeper.
create index holds_due on metered.holds (due, no) where pending;

-- Lists by holder, and by the linked entity.
create index holds_holder on metered.holds (tenant, holder, no) where holder <> '';
create index holds_entity on metered.holds (tenant, entity, no) where entity is not null;

-- At most one active claim of a value. The ledger sees to that already; this is how it is found.
create unique index holds_claim on metered.holds (claim)
    where claim is not null and (state = 'h' or state = 'c' and not returned);

-- The order of a purge. A captured claim is kept while it stands.
create index holds_ended on metered.holds (ended_at)
    where ended_at is not null and (claim is null or state <> 'c' or returned);

-- The holds of jobs that have not ended: see jobs.Enqueuer.Run.
create index holds_jobs on metered.holds (no) where pending and id like 'job/%';

-- One scope of a hold.
create table metered.hold_lines (
    hold     bigint      not null,      -- holds.no
    key      bigint      not null,      -- of the scope's lock
    amount   bigint      not null,      -- placed
    captured bigint      not null default 0, -- spent of amount
    open     bigint      not null,      -- counted in the scope's held, unless due
                                        -- is before its next_due: then it was freed
    due      timestamptz not null,      -- holds.due
    scope    text collate "C" not null, -- the scope that it holds units of
    refunded bigint      not null default 0,    -- units of captured that return_holds gave back
    opened_seq bigint    not null,      -- the entry that holds its units
    at_least bigint      not null default 0,    -- is captured when the hold expires,
                                                -- as far as it was not before
    primary key (hold, scope)
);

-- Which lines of a scope fall due first. Read from next_due on, so that entries of lines that
-- ended, which a long snapshot keeps alive, are not waded through. Lines of a hold are asked for
-- with open <> 0, which keeps the planner from this index.
create index hold_lines_due on metered.hold_lines (scope, due) where open > 0;

-- Which lines will capture something when they expire.
create index hold_lines_least on metered.hold_lines (scope, due) where open > 0 and at_least > 0;

-- The rows of lots. What a draw, a hold or a refund changes of a lot is in its newest move: a row
-- that each of them updated would get slower with each version that an open snapshot keeps. This
-- one changes where a lot begins, is empty, gets units again, or ends. The view lots has both.
-- Written after an entry of its scope, which the guard lets one writer make.
create table metered.lot_rows (
    no          bigint      generated always as identity primary key, -- the number of the lot
    granted_at  timestamptz not null,   -- when it was granted
    expires_at  timestamptz not null,   -- nothing is drawn of it from here
                                        -- on, or infinity: it never ends
    granted_seq bigint      not null,   -- the entry that credited it
    last_seq    bigint      not null,   -- the last entry that moved units of
                                        -- it, where no move of it has its units
    amount      bigint      not null,   -- units that it was granted with
    rest        bigint      not null,   -- units that can be drawn, where
                                        -- no move of it has its units
    drawn       bigint      not null default 0, -- units that were spent, less refunds,
                                                -- where no move of it has its units
    held        bigint      not null default 0, -- units in open holds and leases,
                                                -- where no move of it has its units
    lapsed      bigint      not null default 0, -- units of amount that were left
                                                -- at its end, or refunded later
    revoked     bigint      not null default 0, -- units of amount that were taken back
    rolled      bigint      not null default 0, -- units of amount that rolled over into another lot
    untold      bigint      not null default 0, -- units of lapsed that no
                                                -- subscriber has heard of yet
    roll_cap    bigint,                 -- units that roll over at its end at most, or null: none
    roll_no     bigint,                 -- the number that one will have
    roll_end    timestamptz,            -- when that lot ends, or infinity: never
    late        interval,               -- how long units last that are refunded
                                        -- after its end: 0 for ever, null not at all
    from_lot    bigint,                 -- the lot that its units were in before
    priority    int         not null,   -- a lot of a lower priority is drawn first
    origin      "char"      not null,   -- g granted, c credited without a grant,
                                        -- r rolled over, l given back late
    open        boolean     not null,   -- something can be drawn of it
                                        -- for anything, but for its end
    scope       text collate "C" not null, -- the wallet
    category    text collate "C" not null, -- of the caller: paid, promotional
    reference   text collate "C",       -- of the caller, once in a wallet
    fingerprint bytea,                  -- of the grant under the reference:
                                        -- a version byte and a SHA-256
    pending     bigint      not null default 0, -- units of amount that nobody
                                                -- can draw before starts_at
    starts_at   timestamptz,            -- when it begins, or began, or null: with the grant
    again       boolean     not null default false, -- its units roll over again, or share a cap:
                                                    -- no call leaves its end to a later one
    plan        metered.lot_plan,       -- how it renews and rolls over,
                                        -- and what it pays for, or null
    kept        bigint      not null default 0, -- units that pay for the uses of its plan
                                                -- alone, where no move of it has its units
    keeps       boolean     not null default false, -- something can be drawn of it
                                                    -- for its uses, but for its end
    age         bigint[]    not null default '{}' -- when its units were granted first, in
                                                  -- microseconds, the entry of that grant,
                                                  -- and its own: the oldest is drawn first
);

-- The order in which lots are drawn.
create index lots_open on metered.lot_rows (scope, priority, expires_at, age) where open;

-- The lots of a wallet by their end, and the lots that roll over, in the order in which they are
-- drawn then.
create index lots_ends on metered.lot_rows (scope, expires_at, age) where open;
create index lots_rolling on metered.lot_rows (scope, priority, roll_end, age)
    where open and roll_cap is not null;

-- Lots that begin later, in one wallet and in all.
create index lots_starts on metered.lot_rows (scope, starts_at, age) where pending > 0;
create index lots_starting on metered.lot_rows (starts_at, no) where pending > 0;

-- Lots whose end no call leaves to a later one, and lots that hold units which rolled over.
create index lots_again on metered.lot_rows (scope, expires_at, age) where open and again;
create index lots_carried on metered.lot_rows (scope, category, expires_at)
    where origin = 'r' and (open or keeps);

-- Lots that pay for some uses: in the order in which they are drawn, and by their end, in one
-- wallet and in all.
create index lots_kept on metered.lot_rows (scope, priority, expires_at, age) where keeps;
create index lots_kept_ends on metered.lot_rows (scope, expires_at, age) where keeps;
create index lots_kept_rolling on metered.lot_rows (scope, expires_at, age)
    where keeps and roll_cap is not null;
create index lots_kept_due on metered.lot_rows (expires_at, no) where keeps;

-- The lots of all wallets by their end, with those that subscribers have not heard of.
create index lots_due on metered.lot_rows (expires_at, no) where open or untold > 0;

-- The lots of one wallet that subscribers have not heard of.
create index lots_untold on metered.lot_rows (scope, expires_at, no) where untold > 0;

create unique index lots_reference on metered.lot_rows (scope, reference)
    where reference is not null;

-- A lot is rolled over once.
create unique index lots_rolled on metered.lot_rows (from_lot) where origin = 'r';

-- All lots of a wallet by their end, also those of which nothing is left.
create index lots_scope on metered.lot_rows (scope, expires_at, no);

-- The lots that a lot went on in.
create index lots_from on metered.lot_rows (from_lot) where from_lot is not null;

-- The effect of each entry of a wallet on its lots.
create table metered.lot_moves (
    seq    bigint not null,             -- the entry
    nth    int    not null,             -- 1, 2, 3 and so on in the entry
    lot    bigint not null,             -- lots.no, or 0: overdraft, which no lot covers
    amount bigint not null,             -- how many units
    back   bigint not null default 0,   -- units of amount that refunds gave back
    kind   "char" not null,             -- d credited, t taken by a charge, p taken to pay an
                                        -- overdraft back, g given back by a refund, h held, q
                                        -- held in place of an overdraft, u captured, f freed,
                                        -- e lapsed, v revoked, o rolled over, s scheduled for
                                        -- later, or its end set, w withdrawn before it began,
                                        -- a applied to a use that takes them now, b back to
                                        -- its uses, n reinstated after v, m reinstated after w
    scope  text collate "C" not null,   -- the wallet
    version bigint,                     -- 1, 2, 3 and so on of its lot. After the newest one,
                                        -- the lot has these units. Null: overdraft, or of 0.1.0
    rest   bigint,                      -- units of the lot that can be drawn
    drawn  bigint,                      -- units of the lot that were spent, less refunds
    held   bigint,                      -- units of the lot in open holds and leases
    kept   bigint,                      -- units of the lot that pay for the uses of its plan alone
    primary key (scope, seq, nth)
);

-- The newest move of a lot.
create unique index lot_moves_lot on metered.lot_moves (lot, version) where version is not null;

-- Overdrafts that were paid back. A refund of overdrawn units gives them back to the lot that paid.
create index lot_moves_paid on metered.lot_moves (scope, seq, nth)
    where kind = 'p' and amount > back;

-- Units of lots in open holds and leases, and of lines that a sum freed, until a sweep ends their
-- holds.
create table metered.lot_holds (
    seq    bigint not null,             -- the entry that held the units: hold_lines.opened_seq
                                        -- or leases.opened_seq. 0: spent units that are
                                        -- overdrawn, while ends of lots are unwritten
    lot    bigint not null,             -- lots.no, or 0: overdraft
    amount bigint not null,             -- units
    scope  text collate "C" not null,   -- the wallet
    primary key (scope, seq, lot)
);

-- Overdrafts.
create index lot_holds_overdrawn on metered.lot_holds (scope, seq) where lot = 0;

-- Every transition, written with it.
create table metered.hold_events (
    hold      bigint      not null,     -- holds.no
    at        timestamptz not null,     -- when it was recorded
    deadline  timestamptz,              -- of a place or an extension: the new one
    version   int         not null,     -- 1, 2, 3 and so on in the hold
    kind      "char"      not null,     -- h placed, p captured in part, c captured, e extended,
                                        -- r released, x expired, g given back in part, b given back
    entity    text,                     -- the entity that a capture linked
    detail    jsonb,                    -- a place's constants, a capture's lines, or the
                                        -- units given back, with (b) those that were not
    note      jsonb,                    -- actor, tenant, correlation, reason
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command did it
    primary key (hold, version)
);

-- The latest time of an id whose hold was purged. Never decreases.
create table metered.holds_horizon (
    at  timestamptz not null,           -- ids of this time and before are retired
    one boolean primary key default true check (one) -- there is one row
);

insert into metered.holds_horizon (at) values ('-infinity');
