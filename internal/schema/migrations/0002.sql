-- Version 2: the functions take other arguments; a line of a hold says how much of it was
-- given back; an operation can be one that was refused, and has a name; scopes can be declared to exist; an entry
-- of the ledger can carry an anchor.
alter table metered.hold_lines add column refunded bigint not null default 0, add column opened_seq bigint,
    add column at_least bigint not null default 0;
create index hold_lines_least on metered.hold_lines (scope, due) where open > 0 and at_least > 0;
alter table metered.operations add column refusal json, add column name text collate "C", add column jobs bigint[];
alter table metered.ledger add column anchor_at timestamptz, add column anchor_spent bigint, add column lots_end timestamptz,
    add column crossed jsonb;

-- Scopes that were declared to exist. Only charges, credits and holds that demand it look here.
-- A row stays when its scope is retired, so that no program creates the scope again unawares.
create table metered.resources (
    created_at timestamptz not null,    -- when it was declared first
    retired_at timestamptz,             -- since when nothing new is let in; null if it is
    scope      text collate "C" primary key -- what exists
);

-- Leases: units of a scope that are spent without its lock, until the lease is settled. A row is the
-- history of one.
create table metered.leases (
    no          bigint      generated always as identity primary key, -- the number of the lease
    opened_at   timestamptz not null,   -- when it was opened
    ends_at     timestamptz not null,   -- nothing is spent of it from here on, and anybody may settle it
    settled_at  timestamptz,            -- when it was settled; null while it is open
    granted     bigint      not null,   -- units that it held
    spent       bigint,                 -- of granted, what was captured when it was settled
    fence       bigint      not null,   -- the key of its lock
    opened_seq  bigint      not null,   -- the entry that holds its units
    settled_seq bigint,                 -- the last entry of its end
    mode        "char"      not null,   -- s its spends are rows, m they are in its owner's memory, c a child scope has it,
                                        -- r one on another cluster has it; g this is that cluster's side of it
    scope       text collate "C" not null, -- whose units they are
    owner       text collate "C" not null, -- the process that opened it
    settled_by  text collate "C",       -- who settled it: its owner, or another
    child       text collate "C"        -- the scope that its units were carved for
);

-- A scope is carved for once.
create unique index leases_child on metered.leases (child, (mode = 'r')) where child is not null;

-- What is open of a scope, when it ends, and the history of a scope and by age.
create index leases_open on metered.leases (scope, ends_at) where settled_at is null;
create index leases_due on metered.leases (ends_at) where settled_at is null;
create index leases_scope on metered.leases (scope, no);
create index leases_settled on metered.leases (settled_at) where settled_at is not null;

-- What was spent from leases, in the transactions that spent it. Each takes a range of its lease.
create table metered.lease_spends (
    lease     bigint      not null,     -- leases.no
    at_offset bigint      not null,     -- where its range begins, from 0 on
    amount    bigint      not null,     -- how long it is
    at        timestamptz not null,     -- when
    namespace text,                     -- of the operation
    operation text,                     -- the operation's id, where a command spent it
    note      jsonb,                    -- actor, tenant, correlation, reason
    primary key (lease, at_offset)
);

-- Lots: the credit of a wallet, in parts that end. What a wallet has is in its ledger, as of any scope; this is where
-- it is from. amount = rest + drawn + held + lapsed + revoked + rolled. The columns of a lot are only changed behind an entry
-- of its scope, which the guard lets one writer make.
create table metered.lots (
    no          bigint      generated always as identity primary key, -- the number of the lot
    granted_at  timestamptz not null,   -- when it was granted
    expires_at  timestamptz not null,   -- nothing is drawn of it from here on; infinity: it never ends
    granted_seq bigint      not null,   -- the entry that credited it
    last_seq    bigint      not null,   -- the last entry that moved units of it
    amount      bigint      not null,   -- units that it was granted with
    rest        bigint      not null,   -- of amount, what can be drawn
    drawn       bigint      not null default 0, -- of amount, what was spent, less what was given back
    held        bigint      not null default 0, -- of amount, what open holds and leases keep
    lapsed      bigint      not null default 0, -- of amount, what was left at its end, or given back later
    revoked     bigint      not null default 0, -- of amount, what was taken back
    rolled      bigint      not null default 0, -- of amount, what went on in another lot
    untold      bigint      not null default 0, -- of lapsed, what subscribers were not told of yet
    roll_cap    bigint,                 -- at its end, so much goes on in another lot; null: nothing
    roll_for    interval,               -- how much longer that one lasts; 0: for ever
    late        interval,               -- how long it lasts what is given back after its end; 0: for ever; null: it lapses
    from_lot    bigint,                 -- the lot that its units were in before
    priority    int         not null,   -- what is drawn first: the lower one
    origin      "char"      not null,   -- g granted, c credited without a grant, r rolled over, l given back late
    open        boolean     not null,   -- something can be drawn of it, but for its end
    scope       text collate "C" not null, -- the wallet
    category    text collate "C" not null, -- of the caller: paid, promotional
    reference   text collate "C",       -- of the caller, once in a wallet
    fingerprint bytea                   -- of what was granted under the reference: a version byte and a SHA-256
) with (fillfactor = 70);

-- The order in which lots are drawn. Neither a draw that leaves a rest, nor what is in a lot that is drawn empty, changes
-- an indexed column.
create index lots_open on metered.lots (scope, priority, expires_at, no) where open;

-- What ends first, of all wallets, and what is to be told.
create index lots_due on metered.lots (expires_at, no) where open or untold > 0;

create unique index lots_reference on metered.lots (scope, reference) where reference is not null;

-- A lot is rolled over once.
create unique index lots_rolled on metered.lots (from_lot) where origin = 'r';

create index lots_scope on metered.lots (scope, no);

-- What each entry of a wallet did to its lots.
create table metered.lot_moves (
    seq    bigint not null,             -- the entry
    nth    int    not null,             -- 1, 2, 3 and so on in the entry
    lot    bigint not null,             -- lots.no; 0: overdraft, which no lot covers
    amount bigint not null,             -- how many units
    back   bigint not null default 0,   -- of what was taken, what refunds gave back
    kind   "char" not null,             -- d credited, t taken by a charge, p taken to pay back what was overdrawn, g given back by a refund;
                                        -- h held, q held in place of what was overdrawn, u captured, f freed; e lapsed, v revoked, o rolled over
    scope  text collate "C" not null,   -- the wallet
    primary key (scope, seq, nth)
);

-- What was overdrawn, and paid back: a refund of that gives it back.
create index lot_moves_paid on metered.lot_moves (scope, seq, nth) where kind = 'p';

-- What open holds and leases keep of lots.
create table metered.lot_holds (
    seq    bigint not null,             -- the entry that held the units: hold_lines.opened_seq, leases.opened_seq
    lot    bigint not null,             -- lots.no; 0: overdraft
    amount bigint not null,             -- units
    scope  text collate "C" not null,   -- the wallet
    primary key (scope, seq, lot)
);

-- What version 1 gave back: all that was captured, but for what it says it could not.
update metered.hold_lines l set refunded = l.captured - coalesce((
    select sum(x.amount) from metered.hold_events e, jsonb_to_recordset(e.detail) x(scope text, amount bigint)
    where e.hold = l.hold and e.kind = 'b' and x.scope = l.scope), 0)
from metered.holds h where h.no = l.hold and h.returned;
