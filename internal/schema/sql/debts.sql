-- Overdraft by use: a lot that pays for some uses repays what was drawn for them, from its own units, when these come: at its
-- beginning, from a hold, by a refund or a reinstatement. A lot for anything pays what was drawn for no use first.

-- Overdraft that was drawn for uses, and that no lot has paid: a lot that pays for the use repays it. The rest of a wallet's
-- overdraft was drawn for no use.
create table metered.lot_debts (
    amount bigint not null,             -- spent units, 1 or more
    scope  text collate "C" not null,   -- the wallet
    use    text collate "C" not null,   -- the use in the note of the draw, or of the hold that was captured
    primary key (scope, use)
);

-- Notes spent units that no lot covers, if the entry of_seq says what they were for: a charge, or the one that held them.
create function metered._owe_use(of_scope text, of_seq bigint, units bigint) returns void
language plpgsql volatile
as $$
declare
    of_use text := (select e.note ->> 'use' from metered.ledger e where e.scope = of_scope and e.seq = of_seq);
begin
    if of_use is not null and units > 0 then
        insert into metered.lot_debts as d (scope, use, amount) values (of_scope, of_use, units)
        on conflict (scope, use) do update set amount = d.amount + excluded.amount;
    end if;
end
$$;

-- Lowers overdraft that was drawn for uses by so many units, in the order of the uses: of all, or only of some.
create function metered._lower_debts(of_scope text, units bigint, for_uses text[]) returns void
language plpgsql volatile
as $$
declare
    d metered.lot_debts;
begin
    for d in select y.* from metered.lot_debts y where y.scope = of_scope and (for_uses is null or y.use = any (for_uses)) order by y.use loop
        exit when units <= 0;
        if d.amount <= units then
            delete from metered.lot_debts y where y.scope = of_scope and y.use = d.use;
        else
            update metered.lot_debts y set amount = y.amount - units where y.scope = of_scope and y.use = d.use;
        end if;
        units := units - d.amount;
    end loop;
end
$$;

-- Notes that so many of the spent units were paid for, or refunded, of all that were overdrawn: first of those for the use first_use, then of those
-- for no use, and then of others.
create function metered._debt_paid(of_scope text, units bigint, spent bigint, first_use text) returns void
language plpgsql volatile
as $$
declare
    named bigint := (select coalesce(sum(y.amount), 0) from metered.lot_debts y where y.scope = of_scope);
    own   bigint;
begin
    if named = 0 then
        return;
    end if;
    own := least(units, coalesce((select y.amount from metered.lot_debts y where y.scope = of_scope and y.use = first_use), 0));
    perform metered._lower_debts(of_scope, own, array[first_use]);
    perform metered._lower_debts(of_scope, units - own - (spent - named), null);
end
$$;

-- A lot whose units have come pays overdraft that was drawn for its uses. Appends the entry after tip, and returns it.
create function metered._pay_debts(tip metered.ledger, of_lot bigint) returns metered.ledger
language plpgsql volatile
as $$
declare
    l     metered.lots;
    e     metered.ledger;
    units bigint;
begin
    if not exists (select from metered.lot_debts y where y.scope = tip.scope) then
        return tip;
    end if;
    l := metered._find_lot(tip.scope, of_lot, null);
    units := least(l.kept, (select coalesce(sum(y.amount), 0) from metered.lot_debts y
        where y.scope = tip.scope and y.use = any ((l.plan).uses)));
    if (units > 0 and l.expires_at > tip.at) is not true then
        return tip;
    end if;
    e := metered._own_entry(tip, tip.at);
    e.seq := tip.seq + 1;
    e.kind := 'd';
    e.amount := units;
    e.credited := tip.credited + units;
    if e.crossed is not null then
        e.crossed := metered._rearmed(e);
    end if;
    perform metered._append(e);
    perform metered._move_lot(e.scope, e.seq, 1, of_lot, 'a', units, units, -units);
    perform metered._move_lot(e.scope, e.seq, 2, of_lot, 'p', units, -units, 0);
    perform metered._lower_debts(e.scope, units, (l.plan).uses);
    if metered._lags(e) then
        perform metered._owe(e.scope, -units);
    end if;
    return e;
end
$$;

-- The same for several lots, in the order of their numbers.
create function metered._pay_all_debts(tip metered.ledger, nos bigint[]) returns metered.ledger
language plpgsql volatile
as $$
declare
    of_lot bigint;
begin
    for of_lot in select distinct n from unnest(nos) n order by n loop
        tip := metered._pay_debts(tip, of_lot);
    end loop;
    return tip;
end
$$;
