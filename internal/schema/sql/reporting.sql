-- Views for people and their tools: the tables with words for kinds and states, and without the
-- columns that is nobody's business. No function of a command reads them. See
-- metered.GrantReportingSQL.
--
-- They are stable: a later version may add columns at the end, and changes none. A view belongs to
-- the schema's owner and reads with the owner's rights; so a role that may read the view needs no
-- right on its tables. None of them hides rows, so none is a security_barrier, which would keep
-- conditions from the indexes. Now is metered.clock(), which the reader may execute. It stands in a
-- subquery of its own: beside the columns it would keep conditions from the indexes.

-- The entries of the ledger: the statement of each scope. By scope it reads the primary key: 1 ms
-- for a thousand entries. Without a scope it reads the whole ledger, and a condition on the time
-- alone does not help. The spends from a lease are one capture here, and rows of
-- lease_spends_words.
create view metered.statement as
select l.scope,                                 -- the charged scope
    l.seq,                                      -- 1, 2, 3 and so on in the scope
    l.at,                                       -- by the database's clock
    case l.kind when 'c' then 'charge' when 'd' then 'credit' when 'r' then 'refund'
        when 'k' then 'clock repair' when 'z' then 'close'
        when 'h' then 'hold' when 'u' then 'capture' when 'l' then 'release' when 'x' then 'expire'
        when 'e' then 'lapse' when 'v' then 'revoke' when 'o' then 'roll over'
        when 's' then 'schedule'
        end as kind,                            -- the kind of entry
    l.amount,                                   -- of the entry, never negative
    case when l.kind in ('c', 'u', 'e', 'v', 'o') then l.amount
        when l.kind in ('r', 'd') then -l.amount else 0
        end as change,                          -- of used
    l.spent - l.refunded - l.credited as used,  -- charges less refunds and credits, so far
    l.held,                                     -- in open holds now
    l.spent,                                    -- charges so far
    l.refunded,                                 -- refunds so far
    l.credited,                                 -- credits so far, less revoked and lapsed units
    l.ref as refunds_seq,                       -- of a refund: the number of its charge
    l.hold,                                     -- the hold's id, where the entry is about one alone
    l.operation_tenant,                         -- of the operation
    l.operation,                                -- the operation's id
    l.note ->> 'actor' as actor,                -- the person or process that made it
    l.note ->> 'tenant' as tenant,              -- for whom
    l.note ->> 'correlation' as correlation,    -- the request or case that it belongs to
    l.note ->> 'reason' as reason,              -- why
    l.note ->> 'occurred_at' as occurred_at,    -- of a usage event: when it happened, in ISO 8601
    l.note ->> 'use' as use                     -- the use that a charge or a hold is for
from metered.ledger l;

-- The state of each scope, by its last entry. One scope, or a range of names, takes 20 microseconds
-- a scope. All of them, or a condition on anything else, read the sixteenth part of the ledger that
-- is indexed by time, and each scope's last entry: 0.1 s for ten thousand scopes.
create view metered.scopes as
select f.scope,                                 -- its name
    l.seq as entries,                           -- how many entries were ever made
    l.spent - l.refunded - l.credited + l.apart as used, -- charges less refunds and credits
    l.held,                                     -- in open holds, those that are due and
                                                -- not swept among them, and on leases
    l.spent + l.apart as spent,                 -- charges
    l.refunded,                                 -- refunds
    l.credited,                                 -- credits, less revoked and lapsed units
    f.at as first_at,                           -- when the first entry was made
    l.at as last_at,                            -- when the last entry was made
    l.epoch as clock_repairs,                   -- so many
    coalesce(l.next_due = '-infinity', false) as closed, -- carved from another scope, and
                                                         -- given back: nothing new is let in
    r.created_at,                               -- when it was declared, or null
    r.retired_at,                               -- since when nothing new is let in
                                                -- that demands a declared scope
    case when l.lots_end is not null then l.credited - l.spent + l.refunded - l.held
        end as balance,                         -- of a wallet: units that can be drawn,
                                                -- or less than 0 if it is overdrawn. Lots
                                                -- that ended and are not swept count
    nullif(l.lots_end, 'infinity') as lots_end,  -- of a wallet: no lot with units ends
                                                 -- before this, or null: none ends
    l.crossed as told                           -- thresholds that were reached and
                                                -- reported, by kind (p of a period, w of
                                                -- a window, l of a lifetime, in upper
                                                -- case of spending alone), limit and name
from metered.ledger f
    cross join lateral (select y.seq, y.spent, y.refunded, y.credited, y.held, y.at, y.epoch,
        y.next_due, y.lots_end, y.crossed,
            case when y.tallied then (select coalesce(sum(x.amount), 0)::bigint
                    from metered.tallies x where x.scope = y.scope) else 0 end as apart
        from metered.ledger y where y.scope = f.scope order by y.seq desc limit 1) l
    left join metered.resources r on r.scope = f.scope
where f.seq = 1 and f.seq & 15 = 1;             -- as the index over time has it

-- Holds, with words for their states. One that is due has expired, whether that is recorded or not.
-- By tenant and id, by tenant and holder, by tenant and entity, or by no it reads an index. Units
-- and reason cost a look-up for each row that is shown. Everything else reads all holds.
create view metered.holds_words as
select h.no,                                    -- the number of the hold, in the order of placing
    h.tenant,                                   -- keeps the ids of tenants apart
    h.id,                                       -- chosen by the caller, or made up
    h.holder,                                   -- the holder
    case when h.state = 'h' and h.due <= c.now then 'expired' when h.state = 'h' then 'held'
        when h.returned then 'captured and given back' when h.state = 'c' then 'captured'
        when h.state = 'r' then 'released' else 'expired' end as state, -- the state
    h.placed_at,                                -- when it was placed
    h.deadline,                                 -- when it ends, unless it is extended
    h.due,                                      -- deadline and grace: its
                                                -- units are free from here on
    case when h.state = 'h' and h.due <= c.now then h.due else h.ended_at
        end as ended_at,                        -- when it ended
    h.claim,                                    -- the claimed scope, if it is a claim
    h.entity,                                   -- the entity that a capture linked
    h.metadata,                                 -- of the caller
    (select jsonb_object_agg(l.scope, l.amount) from metered.hold_lines l where l.hold = h.no)
        as units,                               -- by scope, as they were placed
    (select jsonb_object_agg(l.scope, case when h.state = 'x' or h.state = 'h' and h.due <= c.now
        then greatest(l.captured, l.at_least) else l.captured end)
    from metered.hold_lines l
    where l.hold = h.no)
        as captured,                            -- of these, by scope
    case when h.state = 'r' or h.returned then (
        select e.note ->> 'reason'
        from metered.hold_events e
        where e.hold = h.no and e.version = h.version)
        end as reason                           -- why it was released or given back
from metered.holds h, (select metered.clock() as now) c;

-- The history of holds, with words for the transitions. By tenant and id it reads an index,
-- everything else reads all that ever happened.
create view metered.hold_events_words as
select h.tenant,                                -- of the hold
    h.id,                                       -- of the hold
    e.version,                                  -- 1, 2, 3 and so on in the hold
    case e.kind when 'h' then 'placed' when 'p' then 'captured in part' when 'c' then 'captured'
        when 'e' then 'extended'
        when 'r' then 'released' when 'x' then 'expired' when 'g' then 'returned in part'
        when 'b' then 'returned'
        end as kind,                            -- the transition
    e.at,                                       -- when it was recorded
    e.deadline,                                 -- the new one, of a placement or an extension
    e.entity,                                   -- the entity that a capture linked
    e.detail,                                   -- more about it
    e.note,                                     -- actor, tenant, correlation, reason
    e.operation_tenant,                         -- of the operation
    e.operation                                 -- the operation's id
from metered.hold_events e join metered.holds h on h.no = e.hold;

-- Leases, with words. By no, or by scope, it reads an index. Everything else reads all leases.
create view metered.leases_words as
select l.no,                                    -- the number of the lease
    l.scope,                                    -- whose units they are
    l.owner,                                    -- the process that opened it
    l.child,                                    -- the scope that its units were carved for
    case l.mode when 's' then 'rows' when 'm' then 'memory' when 'c' then 'carved'
        when 'r' then 'away' else 'received'
        end as mode,                            -- how its spends are recorded
    case when l.settled_at is not null then 'settled' when l.ends_at <= c.now then 'ended'
        else 'out'
        end as state,                           -- ended: its time is over,
                                                -- and nobody has settled it
    l.opened_at,                                -- when it was opened
    l.ends_at,                                  -- nothing is spent of it from here on
    l.settled_at,                               -- when it was settled
    l.settled_by,                               -- the process that settled it
    l.granted,                                  -- units that it held
    l.spent,                                    -- captured units of granted, once it is settled
    l.opened_seq,                               -- the entry of the ledger that holds its units
    l.settled_seq                               -- the last entry of its end
from metered.leases l, (select metered.clock() as now) c;

-- Spends from leases whose spends are rows. By lease it reads an index. Everything else reads all
-- spends.
create view metered.lease_spends_words as
select s.lease,                                 -- leases_words.no
    s.at_offset,                                -- where its range begins in the lease
    s.amount,                                   -- units
    s.at,                                       -- when
    s.operation_tenant,                         -- of the operation
    s.operation,                                -- the operation's id, where a command spent it
    s.note ->> 'actor' as actor,                -- the person or process that spent it
    s.note ->> 'tenant' as tenant,              -- for whom
    s.note ->> 'correlation' as correlation,    -- the request or case that it belongs to
    s.note ->> 'reason' as reason               -- why
from metered.lease_spends s;

-- Commands that committed, recorded refusals, and usage events. Without the input, of which only a
-- hash is stored, and without the result. By tenant and id, or by the time at, it reads an index.
-- Everything else reads all records.
create view metered.operations_words as
select o.tenant,                                -- keeps the ids of tenants apart
    o.id,                                       -- chosen by the caller
    o.name,                                     -- the command's name, or null of a usage event
    case when o.refusal is null then 'committed' else 'refused' end as state, -- the state
    o.at,                                       -- when it was completed
    o.issued_at,                                -- the time that the id carries, if it does
    o.scopes,                                   -- the charged scopes
    o.amounts,                                  -- the amount of each charge
    o.seqs,                                     -- the number of each entry, or
                                                -- 0 of a spend from a lease
    o.ats,                                      -- the time of each entry
    (select jsonb_agg(jsonb_build_object('tenant', j.h ->> 'tenant', 'id', j.h ->> 'id', 'state',
                case
            when (j.h ->> 'returned')::boolean then 'returned'
            else case j.h ->> 'state' when 'h' then 'held' when 'c' then 'captured'
                when 'r' then 'released' else 'expired' end end))
        from (select x::json as h from unnest(o.holds) x where not starts_with(x, '{"drawn"')) j)
        as holds,                               -- the holds that it placed,
                                                -- captured, released or gave back
    o.jobs,                                     -- the ids of River's jobs that it made
    o.refusal ->> 'code' as refusal_code,       -- why it was refused, as metered.Code has it
    o.refusal ->> 'text' as refusal_text,       -- the same for people
    o.refusal -> 'exceeded' -> 'refusals' as refusal_limits -- of a refusal by limits:
                                                            -- which, and by how much
from metered.operations o;

-- Tokens without anything that a thief could use: neither the token, which is stored nowhere, nor
-- its digest, nor its payload. By purpose and subject, of tokens that are open, it reads an index
-- if ended_at is null is asked for; everything else reads all tokens.
create view metered.tokens_words as
select t.purpose,                               -- the right that it grants
    t.subject,                                  -- the user or thing that it is for
    case when t.used >= t.uses then 'used up' when t.revoked then 'revoked'
        when t.ended_at is not null or t.expires_at <= c.now then 'expired' else 'open'
        end as state,                           -- the state
    t.minted_at,                                -- when it was minted
    t.expires_at,                               -- when it is no longer good
    t.ended_at,                                 -- last use, revocation, or
                                                -- expiry seen by a revocation
    t.uses,                                     -- how often it can be used
    t.used,                                     -- how often it was
    t.sole                                      -- whether it replaced the subject's token before it
from metered.tokens t, (select metered.clock() as now) c;

-- Lots of wallets, with words for their states. By scope, or by no, it reads an index. Everything
-- else reads all lots. What is in a lot adds up: granted = rest + drawn + held + lapsed + revoked +
-- rolled + pending. Units of a lot that pays for some uses are in rest, too.
create view metered.lots_words as
select y.no,                                    -- the number of the lot
    y.scope,                                    -- the wallet
    y.reference,                                -- of the caller, once in a wallet
    y.category,                                 -- of the caller, as paid or promotional
    y.priority,                                 -- the lower one is drawn first
    case when y.pending > 0 then 'pending'
        when y.rest + y.kept > 0 and y.expires_at <= c.now then 'ended'
        when y.rest + y.kept > 0 then 'open' when y.held > 0 then 'held'
        when y.lapsed > 0 or y.rolled > 0 then 'ended'
        when y.revoked > 0 and y.revoked = y.amount then 'revoked' else 'used up'
        end as state,                           -- ended: units were left at its end, whether
                                                -- that is written down or not. held: the
                                                -- rest is in open holds and leases
    case y.origin when 'g' then 'granted' when 'c' then 'credited' when 'r' then 'rolled over'
        else 'given back late'
        end as origin,                          -- where its units are from
    y.from_lot,                                 -- the lot that they were in before
    y.granted_at,                               -- when it was granted
    nullif(y.expires_at, 'infinity') as expires_at, -- nothing is drawn of it from
                                                    -- here on, or null: it never ends
    y.amount as granted,                        -- units that it was granted with
    y.rest + y.kept as rest,                    -- units that can be drawn. After
                                                -- its end, units that lapse or roll
                                                -- over with the next write or sweep
    y.drawn,                                    -- units that were spent, less refunds
    y.held,                                     -- units in open holds and
                                                -- leases, after its end, too
    y.lapsed,                                   -- units that were left at its end
                                                -- or refunded later: breakage
    y.revoked,                                  -- units that were taken back
    y.rolled,                                   -- units that rolled over into another lot
    y.granted_seq,                              -- the entry that credited it
    y.last_seq,                                 -- the last entry that moved units of it
    y.pending,                                  -- units that nobody can draw before starts_at
    y.starts_at,                                -- when it begins, or began, or null: with the grant
    (y.plan).of_reference as of_reference,      -- the reference of the lot that
                                                -- had its units first, or null
    (y.plan).renewal as renewal,                -- the reference of the grant
                                                -- that renews by it, or null
    (y.plan).uses as uses                       -- the uses that it pays for alone, or null: all
from metered.lots y, (select metered.clock() as now) c;

-- The statement of each wallet by lot: which lots each entry was of, so where credit went. By scope
-- it reads a primary key, and a look-up for each row. A lot or a time alone does not help. Moves of
-- entries that were purged are gone.
create view metered.lots_statement as
select m.scope,                                 -- the wallet
    m.seq,                                      -- the entry: statement.seq
    m.nth,                                      -- 1, 2, 3 and so on in the entry
    l.at,                                       -- when, by the database's clock
    nullif(m.lot, 0) as lot,                    -- lots_words.no, or null:
                                                -- overdraft, which no lot covers
    y.reference,                                -- of the lot
    y.category,                                 -- of the lot
    case m.kind when 'd' then 'credited' when 't' then 'taken' when 'p' then 'paid back'
        when 'g' then 'given back' when 'h' then 'held' when 'q' then 'held after'
        when 'u' then 'captured' when 'f' then 'freed' when 'e' then 'lapsed'
        when 'v' then 'revoked' when 'o' then 'rolled over' when 's' then 'scheduled'
        when 'w' then 'withdrawn' when 'a' then 'applied' when 'b' then 'kept'
        when 'n' then 'reinstated' when 'm' then 'reinstated'
        end as does,                            -- the effect on the lot. paid back: taken
                                                -- for an earlier overdraft. held after:
                                                -- taken for overdrawn units of an earlier
                                                -- hold. applied: for the use of the next
                                                -- entry. kept: for its uses again
    m.amount,                                   -- units
    case when m.lot = 0 then null when m.kind in ('d', 'g', 'f', 'n') then m.amount
        when m.kind in ('u', 's', 'w', 'a', 'b', 'm') then 0 else -m.amount
        end as change,                          -- of the lot's rest
    m.back as given_back,                       -- drawn units that refunds gave back
    l.ref as refunds_seq,                       -- of a refund: the number of its charge
    l.hold,                                     -- the hold's id, where the entry is about one alone
    l.operation_tenant,                         -- of the operation
    l.operation,                                -- the operation's id
    l.note ->> 'actor' as actor,                -- who made the entry
    l.note ->> 'reason' as reason,              -- why
    l.note ->> 'use' as use                     -- what it is for
from metered.lot_moves m
    join metered.ledger l on l.scope = m.scope and l.seq = m.seq
    left join metered.lot_rows y on y.no = m.lot;

-- The lines of parked jobs: one row for each scope for whose units jobs wait. By scope it reads an
-- index. Everything else reads all lines. oldest_at costs a look-up for each row that is shown.
create view metered.parked_scopes_words as
select p.scope,                                 -- the scope whose units the jobs wait for
    p.waiting,                                  -- jobs in the line
    (select j.parked_at
        from metered.parked_jobs j where j.scope = p.scope order by j.parked_at limit 1)
        as oldest_at,                           -- when the job was parked that waits longest
    case when p.wake_at <= c.now then 'due'
        when p.wake_at < c.now + interval '5 years' then 'waits for a time'
        else 'waits for units'
        end as state,                           -- due: a releaser is to look at it now
    case when p.wake_at > '-infinity' and p.wake_at < c.now + interval '5 years' then p.wake_at
        end as looked_at,                       -- when it is looked at, if no units are freed
                                                -- before. A job's hold without a TTL would end
                                                -- in ten years: that is no time to wait for
    p.started,                                  -- jobs of the line that started since then
    p.since,                                    -- when the line began, or an hour or two ago
    p.trouble                                   -- why the last look at the line failed, or null
from metered.parked_scopes p, (select metered.clock() as now) c;

-- Parked jobs, without their args. By job_id, by scope in the order of priority, turn and job_id,
-- or those in trouble (trouble is not null), it reads an index. Everything else reads all parked
-- jobs. position counts the jobs before each row that is shown: ask for it of a few rows only.
create view metered.parked_jobs_words as
select j.job_id,                                -- the id that it will have in river_job
    j.scope,                                    -- the scope whose units it waits for,
                                                -- or empty: it is in no line until
                                                -- its next attempt, or its next try
    j.amount,                                   -- units that it needs of the scope
    j.priority,                                 -- River's: 1 is first
    1 + (select count(*)
        from (select from metered.parked_jobs b
            where b.scope = j.scope
                and (b.priority, b.turn, b.job_id) < (j.priority, j.turn, j.job_id)
        order by b.priority desc, b.turn desc, b.job_id desc limit 9999) y) as position, -- in the
                                                                                         -- line: 1
                                                                                         -- is next.
                                                                                         -- No
                                                                                         -- further
                                                                                         -- than
                                                                                         -- 10,000
    j.turn,                                     -- its round in the line: jobs
                                                -- of different keys take turns
    j.fair,                                     -- the key of its turns
    j.tenant,                                   -- of the job and its hold
    j.job ->> 'queue' as queue,                 -- River's queue
    j.job ->> 'kind' as kind,                   -- River's kind
    j.job -> 'metadata' ->> 'metered:key' as key, -- of the caller, or null
    j.job -> 'metadata' ->> 'metered:hold' as hold, -- the id that its hold will have
    j.parked_at,                                -- when it was parked
    j.drop_at,                                  -- when it is dropped, or null: never
    j.not_before,                               -- when its next attempt may start,
                                                -- or null: it waits for its first
    j.lane,                                     -- 0, or 1: the row of its second choice
                                                -- of units, for which it waits as well
    j.trouble,                                  -- why its last try failed, or
                                                -- null: it is not in trouble
    j.troubled_at,                              -- when that began, or null
    j.retry_at                                  -- when it is tried again, or null
from metered.parked_jobs j;
