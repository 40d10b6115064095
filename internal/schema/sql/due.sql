-- Units come free when their lines fall due, whoever writes that down. The first writer that needs
-- them does. Where few lines are due, it ends their holds. Where more are due than one step writes,
-- one entry frees their sum (_free_in_sum), however many they are, and their rows are left to
-- sweeps.
--
-- So next_due of the last entry says which lines are still counted as held: those with open units
-- that are due at next_due or later. A line that is due before, or any line if next_due is null,
-- was freed with the sum. It is due at the last entry's time or before. Where next_due becomes
-- earlier than that, after the clock was set back, such lines are cleared first (_clear_freed_of).

-- Units of a scope that due lines, not freed yet, still hold. since is next_due of the last entry.
create function metered._due_units(of_scope text, since timestamptz, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(l.open), 0) from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= clk);
end
$$;

-- When the first line that is not due falls due.
create function metered._first_due(of_scope text, since timestamptz, clk timestamptz)
    returns timestamptz
language plpgsql stable
as $$
begin
    return (select l.due from metered.hold_lines l
            where l.scope = of_scope and l.open > 0 and l.due >= since and l.due > clk
            order by l.due limit 1);
end
$$;

-- A new next_due of a scope, whose old one is since: when the first line falls due, but at most 10
-- seconds after since or now, whichever is later. It reads past ended lines that would have fallen
-- due by then. A further look could read past all lines that were placed and ended meanwhile.
-- Volatile, though it writes nothing: into an insert from a select with a stable function, Citus 13
-- puts a condition without a column.
create function metered._later_due(of_scope text, since timestamptz, clk timestamptz)
    returns timestamptz
language plpgsql volatile
as $$
declare
    horizon timestamptz := greatest(since, clk) + interval '10 s';
begin
    return coalesce((
        select l.due from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= horizon
        order by l.due limit 1), horizon);
end
$$;

-- next_due of the entry after seq, without its own new line. held has its held units. next_due
-- moves on once it has passed, and with two of 16 entries (a call may write two, and skip one of
-- them), so that a search for the first due line need not read past many ended lines.
-- That of a closed scope (carve.sql) stays. Inlined wherever it stands.
create function metered._due_after(of_scope text, seq bigint, held bigint, next_due timestamptz,
    clk timestamptz)
returns timestamptz
language sql volatile
as $$
    select case
        when held > 0 then
            case when next_due > '-infinity' and (next_due <= clk or seq & 15 < 2)
                then metered._later_due(of_scope, next_due, clk)
                else next_due end
        when next_due = '-infinity' then next_due end
$$;
