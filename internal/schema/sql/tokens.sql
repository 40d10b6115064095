-- Mints tokens, all or none, in the order of their digests, so that two calls
-- that mint the same ones do not deadlock. Status 'exists': one of the digests
-- is there already, and nothing was written. That is an answer and not a unique
-- violation, which would end the caller's transaction. Where a snapshot is too
-- old to see the other token, ON CONFLICT raises 40001.
create function metered.mint_tokens(minted metered.new_token[], wait_ms int,
    out status text, out minted_at timestamptz)
language plpgsql volatile
as $$
declare
    before  text := metered._bound_lock_wait(wait_ms);
    fresh   bytea[];
    one     metered.new_token;
begin
    foreach one in array minted loop
        {refuse: when = metered._token_fits(one) is not true or cardinality(minted) > 1000,
            what = tokens};
    end loop;
    mint_tokens.minted_at := metered.clock();
    with inserted as (
        insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject, payload)
        select m.digest, mint_tokens.minted_at, mint_tokens.minted_at + m.ttl, m.uses, m.purpose, m.subject, m.payload
        from unnest(minted) m
        order by m.digest
        on conflict do nothing
        returning tokens.digest)
    select array_agg(i.digest) into fresh from inserted i;
    if coalesce(cardinality(fresh), 0) < cardinality(minted) then
        delete from metered.tokens t where t.digest = any (fresh);
        status := 'exists';
    else
        status := 'ok';
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Whether a token is within its bounds. The table catches nulls. Inlined wherever it stands.
create function metered._token_fits(m metered.new_token) returns boolean
language sql stable
as $$
    select octet_length(m.digest) = 32
        and m.ttl between interval '1 s' and interval '9600:00:00' and m.uses between 1 and 1000000
        and octet_length(m.purpose) between 1 and 128 and octet_length(m.subject) between 1 and 512
        and (m.payload is null or octet_length(m.payload::text) <= 8192)
$$;

-- Looks at a token and changes nothing. Status is 'ok', or why it cannot be
-- consumed: 'unknown', 'purpose', 'subject', 'revoked', 'used', 'expired'. The
-- other columns are null unless it is 'ok', and consumed_at always is.
create function metered.inspect_token(token_digest bytea, for_purpose text, for_subject text,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
as $$
declare
    now_at timestamptz := metered.clock();
    tok    metered.tokens;
begin
    select * into tok from metered.tokens t where t.digest = token_digest;
    status := case
        when tok.digest is null then 'unknown'
        when tok.purpose <> for_purpose then 'purpose'
        when tok.subject <> for_subject then 'subject'
        when tok.revoked then 'revoked'
        when tok.used = tok.uses then 'used'
        when tok.ended_at is not null or tok.expires_at <= now_at then 'expired'
        else 'ok' end;
    if status = 'ok' then
        payload := tok.payload;
        uses_left := tok.uses - tok.used;
        minted_at := tok.minted_at;
        expires_at := tok.expires_at;
    end if;
end
$$;

-- Takes one use of a token, or says why not, with inspect_token's columns.
-- uses_left is the number of uses after this one. A refusal changes nothing. The time
-- that counts is the clock's as the call begins.
--
-- The reason is looked up only after the update found nothing. If that finds the
-- token in order, it was minted between the two statements: the update runs again.
create function metered.consume_token(token_digest bytea, for_purpose text, for_subject text,
    wait_ms int default null,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := current_setting('lock_timeout');
    bounds  boolean := wait_ms is not null and (before = '0' or before::interval > wait_ms * interval '1 ms');
    unused  text;
begin
    if bounds then  -- _bound_lock_wait, without the call
        unused := set_config('lock_timeout', wait_ms::text, true);
    end if;
    for attempt in 1..3 loop
        {use of token}
        returning 'ok', t.payload, t.uses - t.used, t.minted_at, t.expires_at, now_at
        into status, payload, uses_left, minted_at, expires_at, consumed_at;
        if not found then
            status := (metered.inspect_token(token_digest, for_purpose, for_subject)).status;
            continue when status = 'ok';
            if status = 'unknown' and metered._one_snapshot() then
                perform metered._missing_token(token_digest);
            end if;
        end if;
        if bounds then
            unused := set_config('lock_timeout', before, true);
        end if;
        return;
    end loop;
    raise exception 'could not serialize access: the token keeps changing' using errcode = '40001';
end
$$;

-- Takes one use of a token, as consume_token does, by one statement: the short way of ADR 22. The
-- answer is bytes, the server's own form of whole numbers, which no setting spells otherwise:
-- uses_left, whose first byte is zero, and minted_at, expires_at and consumed_at in microseconds
-- since 2000; then the payload, if there is one. A refusal is its status as text.
--
-- The statement sets the lock_timeout, once it has found the token, unless the session's is as
-- short as wait_ms, and takes it back.
create function metered.consume_token_plain(token_digest bytea, for_purpose text, for_subject text,
    wait_ms int) returns bytea
language plpgsql volatile
as $$
declare
    now_at timestamptz := metered.clock();
    before text := current_setting('lock_timeout');
    answer bytea;
    taken  record;      -- the answer of consume_token
begin
    {use of token}
      and metered._goes_short()
      and case when before = '0' then set_config('lock_timeout', wait_ms::text, true) <> ''
          else metered._bound_lock_wait(wait_ms) is distinct from '' end    -- true
    returning case when set_config('lock_timeout', before, true) is not null
        then {granted: of = t, left = t.uses - t.used, consumed = now_at} end
    into answer;
    if answer is null then
        before := set_config('lock_timeout', before, true);
        taken := metered.consume_token(token_digest, for_purpose, for_subject, wait_ms);
        answer := case when taken.status <> 'ok' then convert_to(taken.status, 'UTF8')
            else {granted: of = taken, left = taken.uses_left, consumed = taken.consumed_at} end;
    end if;
    return answer;
end
$$;

-- Fails with 40001 where a token was minted since this snapshot: it is not unknown. Its insertion
-- meets the other one. The block takes it back.
create function metered._missing_token(token_digest bytea) returns void
language plpgsql volatile
as $$
begin
    insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
    values (token_digest, 'epoch', 'epoch', 1, '', '') on conflict do nothing;
    {take back};
end
$$;

-- Revokes one token. False if there was nothing left to revoke.
create function metered.revoke_token(token_digest bytea, wait_ms int) returns boolean
language plpgsql volatile
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered._bound_lock_wait(wait_ms);
    was     boolean;
begin
    update metered.tokens t
    set revoked = true, ended_at = now_at
    where t.digest = token_digest and (t.ended_at is null and t.expires_at > now_at) is true;     -- as in consume_token
    was := found;
    before := metered._unbound_lock_wait(before);
    return was;
end
$$;

-- Ends every open token of a purpose and subject and returns how many of them
-- were still good. Rows are locked in the order of their digests.
create function metered.revoke_tokens(for_purpose text, for_subject text, wait_ms int) returns bigint
language plpgsql volatile
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered._bound_lock_wait(wait_ms);
    digests bytea[];
    total   bigint;
begin
    -- Two statements, so that there is no join to plan, and an order that the key's index
    -- does not have, or all tokens would be read in it, if they were few when this was planned.
    select array_agg(o.digest) into digests from (
        select t.digest from metered.tokens t
        where t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null
        order by t.digest || '' for no key update) o;
    with ended as (
        update metered.tokens t
        set revoked = t.expires_at > now_at, ended_at = least(now_at, t.expires_at)
        where t.digest = any (digests)
        returning t.revoked)
    select count(*) filter (where e.revoked) into total from ended e;
    before := metered._unbound_lock_wait(before);
    return total;
end
$$;

-- Revokes every token of a purpose and subject and mints another, under the
-- advisory lock of that key. Status 'exists' as with mint_tokens: nothing was written.
create function metered.replace_token(key bigint, token metered.new_token, wait_ms int,
    out status text, out minted_at timestamptz, out revoked bigint)
language plpgsql volatile
as $$
declare
    before  text;
begin
    perform metered._require(metered._token_fits(token), 'token');
    perform metered._lock_keys(array[key], wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    if exists (select from metered.tokens t where t.digest = token.digest) then
        status := 'exists';
    else
        revoked := metered.revoke_tokens(token.purpose, token.subject, wait_ms);
        minted_at := metered.clock();
        insert into metered.tokens (digest, minted_at, expires_at, uses, sole, purpose, subject, payload)
        values (token.digest, replace_token.minted_at, replace_token.minted_at + token.ttl,
                token.uses, true, token.purpose, token.subject, token.payload)
        on conflict do nothing;
        if not found then
            raise exception 'could not serialize access: the token was replaced meanwhile'
                using errcode = '40001';
        end if;
        status := 'ok';
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Deletes up to max_rows tokens that ended, or expired, at cutoff or before, oldest
-- first, and skips what another purge is deleting. Never one that lives, whatever cutoff
-- is. after is the last of the batch before (null: from the beginning), so that no batch
-- reads again through the index entries that the one before it left dead.
create function metered.purge_tokens(after timestamptz, cutoff timestamptz, max_rows int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
as $$
declare
    ended timestamptz := least(coalesce(cutoff, '-infinity'), metered.clock());
begin
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    with gone as (
        delete from metered.tokens t
        where t.digest = any (array(
            select d.digest from metered.tokens d
            where coalesce(d.ended_at, d.expires_at) >= coalesce(after, '-infinity')
              and coalesce(d.ended_at, d.expires_at) <= ended
            order by coalesce(d.ended_at, d.expires_at)
            limit max_rows for update skip locked))
        returning coalesce(t.ended_at, t.expires_at) as at)
    select count(*), max(g.at) into deleted, last from gone g;
end
$$;
