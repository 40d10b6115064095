-- Overdraft by use: a lot that pays for some uses repays what was drawn for them, from its own
-- units, when these come: at its beginning, from a hold, by a refund or a reinstatement. A lot for
-- anything pays what was drawn for no use first.

-- Overdraft that was drawn for uses, and that no lot has paid: a lot that pays for the use repays
-- it. The rest of a wallet's overdraft was drawn for no use.
create table metered.lot_debts (
    amount bigint not null,             -- spent units, 1 or more
    scope  text collate "C" not null,   -- the wallet
    use    text collate "C" not null,   -- the use in the note of the draw,
                                        -- or of the hold that was captured
    primary key (scope, use)
);

-- Notes spent units that no lot covers, if the entry of_seq says what they were for: a charge, or
-- the one that held them.
create function metered._owe_use(of_scope text, of_seq bigint, units bigint) returns void
language plpgsql volatile
as $$
declare
    of_use text := (select e.note ->> 'use'
        from metered.ledger e where e.scope = of_scope and e.seq = of_seq);
begin
    if of_use is not null and units > 0 then
        insert into metered.lot_debts as d (scope, use, amount) values (of_scope, of_use, units)
        on conflict (scope, use) do update set amount = d.amount + excluded.amount;
    end if;
end
$$;

-- Notes that so many of the spent units were refunded, of all that were overdrawn: first of those
-- for the use first_use, then of those for no use, and then of others.
create function metered._debt_paid(of_scope text, units bigint, spent bigint, first_use text)
returns void
language plpgsql volatile
as $$
declare
    debts metered.lot_debts[] := metered._load_debts(of_scope);
    own   bigint := least(units,
        (select coalesce(sum(y.amount), 0) from unnest(debts) y where y.use = first_use));
    named bigint := (select sum(y.amount) from unnest(debts) y);
begin
    perform metered._write_debts(of_scope, debts, metered._without_debt(
        metered._without_debt(debts, own, array[first_use]), units - own - (spent - named), null));
end
$$;

-- Overdraft of a wallet that was drawn for uses.
create function metered._load_debts(of_scope text) returns metered.lot_debts[]
language plpgsql stable
as $$
begin
    return array(select row(y.*)::metered.lot_debts from metered.lot_debts y
        where y.scope = of_scope order by y.use);
end
$$;

-- Writes overdraft that was drawn for uses, which was debts before and is after.
create function metered._write_debts(of_scope text, debts metered.lot_debts[],
    after metered.lot_debts[]) returns void
language plpgsql volatile
as $$
begin
    if debts is distinct from after then
        delete from metered.lot_debts d where d.scope = of_scope;
        insert into metered.lot_debts (scope, use, amount)
        select of_scope, d.use, d.amount from unnest(after) d where d.amount > 0;
    end if;
end
$$;

-- Lots to which units have come pay overdraft back (_repaid): with the last move nth of the entry
-- at_seq, to the lots came. owed is by how many units the wallet was overdrawn then. Appends what
-- they pay for their uses after tip, and returns the last entry.
create function metered._pay_back(tip metered.ledger, at_seq bigint, nth int, came bigint[],
    owed bigint) returns metered.ledger
language plpgsql volatile
as $$
declare
    lots  metered.lots[];
    due   record;
    after record;
begin
    if owed > 0 then
        lots := array(select l from (
                select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.open and y.expires_at > tip.at
                union select unnest(came)) n,
            lateral (select z from metered.lots z where z.no = n.no limit 1) x(l));
        due := metered._load_debt(tip.scope, owed, '{}');
        after := metered._repaid(tip, at_seq, nth,
            array(select x.ordinality::int from unnest(lots) with ordinality x
                where x.no = any (came)),
            case when tip.crossed is not null then array[row('-infinity',
                metered._lapsing(tip, least(tip.at, metered.clock())))::metered.unwritten] end,
            lots, due.parts, due.debts, due.spent);
        perform metered._write_due(tip, after.tip, after.entries, after.moves, lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
        tip := after.tip;
    end if;
    return tip;
end
$$;

