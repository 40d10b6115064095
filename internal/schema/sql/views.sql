-- What a person reads in psql: the same rows with words for kinds and states. No function
-- reads them.

-- The ledger, with words for the kinds of entries.
create view metered.ledger_words as
select l.scope,                                 -- what is charged
    l.seq,                                      -- 1, 2, 3 and so on in the scope
    case l.kind when 'c' then 'charge' when 'd' then 'credit' when 'r' then 'refund' when 'k' then 'clock repair' when 'z' then 'close'
        when 'h' then 'hold' when 'u' then 'capture' when 'l' then 'release' when 'x' then 'expire' end as kind, -- what the entry does
    l.amount,                                   -- of the entry
    l.at,                                       -- by the database's clock
    l.spent,                                    -- charges so far
    l.refunded,                                 -- refunds so far
    l.credited,                                 -- credits so far
    l.held,                                     -- in open holds now
    l.ref as refunds_seq,                       -- of a refund: the number of its charge
    l.hold,                                     -- the hold's id, where the entry is about one alone
    l.namespace,                                -- of the operation
    l.operation,                                -- the operation's id
    l.note                                      -- actor, tenant, correlation, reason
from metered.ledger l;

-- Holds, with words for their states. One that is due has expired, whether that is recorded or not.
create view metered.holds_words as
select h.tenant,                                -- keeps the ids of tenants apart
    h.id,                                       -- chosen by the caller, or made up
    h.holder,                                   -- who has it
    case when h.state = 'h' and h.due <= pg_catalog.clock_timestamp() then 'expired' when h.state = 'h' then 'held'
        when h.returned then 'captured and given back' when h.state = 'c' then 'captured'
        when h.state = 'r' then 'released' else 'expired' end as state, -- what became of it
    h.placed_at,                                -- when it was placed
    h.deadline,                                 -- when it ends, unless it is extended
    h.due,                                      -- deadline and grace: its units are free from here on
    h.ended_at,                                 -- when it ended, if that is recorded
    h.claim,                                    -- the scope of what is claimed, if it is a claim
    h.entity,                                   -- what a capture linked
    h.metadata,                                 -- of the caller
    (select jsonb_object_agg(l.scope, l.amount) from metered.hold_lines l where l.hold = h.no) as units, -- by scope
    case when h.state = 'r' or h.returned then (
        select e.note ->> 'reason' from metered.hold_events e where e.hold = h.no and e.version = h.version) end as reason -- why it was released or given back
from metered.holds h;

-- What happened to holds, with words for the transitions.
create view metered.hold_events_words as
select h.tenant,                                -- of the hold
    h.id,                                       -- of the hold
    e.version,                                  -- 1, 2, 3 and so on in the hold
    case e.kind when 'h' then 'placed' when 'p' then 'captured in part' when 'c' then 'captured' when 'e' then 'extended'
        when 'r' then 'released' when 'x' then 'expired' when 'g' then 'returned in part' when 'b' then 'returned' end as kind, -- what happened
    e.at,                                       -- when it was recorded
    e.deadline,                                 -- the new one, of a placement or an extension
    e.entity,                                   -- what a capture linked
    e.detail,                                   -- more about it
    e.note,                                     -- actor, tenant, correlation, reason
    e.namespace,                                -- of the operation
    e.operation                                 -- the operation's id
from metered.hold_events e join metered.holds h on h.no = e.hold;

-- Leases, with words.
create view metered.leases_words as
select l.no,                                    -- the number of the lease
    l.scope,                                    -- whose units they are
    l.owner,                                    -- the process that opened it
    l.child,                                    -- the scope that its units were carved for
    case l.mode when 's' then 'rows' when 'm' then 'memory' when 'c' then 'carved' when 'r' then 'away' else 'received' end as mode, -- how its spends are told
    l.opened_at,                                -- when it was opened
    l.ends_at,                                  -- nothing is spent of it from here on
    l.settled_at,                               -- when it was settled
    l.settled_by,                               -- who settled it
    l.granted,                                  -- units that it held
    l.spent                                     -- of granted, what was captured
from metered.leases l;
