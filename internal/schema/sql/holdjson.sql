-- Holds as JSON.

-- A hold as JSON, which is also on the record of a command: without what is empty, null or false.
-- One that is due has expired, whether that is written down or not. reason is that of its release
-- or return. A ceiling of infinity is none. Inlined wherever it stands.
create function metered._hold_as_json(h metered.holds, lines json, clk timestamptz, reason text)
    returns json
language sql stable
as $$
    select concat('{"tenant":', to_json(h.tenant), ',"id":', to_json(h.id),
        case when h.holder <> '' then ',"holder":' || to_json(h.holder)::text end,
        ',"state":"', case when h.state = 'h' and h.due <= clk then 'x' else h.state end,
        '","version":', h.version,
        ',"placed_at":', to_json(h.placed_at), ',"deadline":', to_json(h.deadline), ',"due":',
        to_json(h.due), ',"ceiling":' || to_json(nullif(h.ceiling, 'infinity'))::text,
        ',"ended_at":' || to_json(case when h.state = 'h' and h.due <= clk then h.due
                else h.ended_at end)::text,
        ',"now":', to_json(clk), ',"claim":' || to_json(h.claim)::text,
        ',"entity":' || to_json(h.entity)::text,
        case when h.returned then ',"returned":true' end, ',"reason":' || to_json(reason)::text,
        ',"metadata":' || h.metadata::text, ',"lines":' || lines::text, '}')::json
$$;

-- A line of a hold as JSON. open is 0 if the hold has ended, also where the line has
-- not been freed yet. Inlined wherever it stands.
create function metered._line_json(of_scope text, amount bigint, captured bigint, open bigint,
    refunded bigint, at_least bigint) returns json
language sql stable
as $$
    select concat('{"scope":', to_json(of_scope), ',"amount":', amount, ',"captured":', captured,
        ',"open":', open,
        case when refunded > 0 then ',"refunded":' || refunded end,
        case when at_least > 0 then ',"at_least":' || at_least end, '}')::json
$$;

-- The hold of that no.
create function metered.hold_json(of_no bigint, clk timestamptz) returns json
language plpgsql stable
as $$
begin
    return (
        select metered._hold_as_json(row(h.*)::metered.holds, (
            select json_agg(metered._line_json(l.scope, l.amount,
                case when h.state = 'x' or h.state = 'h'
                    and h.due <= clk then greatest(l.captured, l.at_least) else l.captured end,
                case when h.state = 'h' and h.due > clk then l.open else 0 end, l.refunded,
                l.at_least) order by l.scope)
            from metered.hold_lines l where l.hold = h.no), clk,
            case when h.state = 'r' or h.returned then (      -- its last transition
                select e.note ->> 'reason'
                from metered.hold_events e
                where e.hold = h.no and e.version = h.version) end)
        from metered.holds h where h.no = of_no);
end
$$;

-- Keeps a command's hold, or its draw of a wallet, for the command's record, which is written later
-- in its transaction. JSON has no record separator in it.
create function metered._remember_hold(hold json) returns text
language plpgsql volatile
as $$
begin
    return set_config('metered_tx.holds',
        concat_ws(chr(30), nullif(current_setting('metered_tx.holds', true), ''),
            hold::text), true);
end
$$;
