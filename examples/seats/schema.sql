-- The application's own tables. The first of its processes makes them.

create schema if not exists hall;

create table if not exists hall.organisations (
    id   uuid primary key,
    name text not null
);

create table if not exists hall.users (
    id   uuid primary key,
    org  uuid not null references hall.organisations,
    name text not null,
    role text not null default 'customer' check (role in ('customer', 'box_office', 'manager'))
);

create table if not exists hall.events (
    id     uuid primary key,
    org    uuid not null references hall.organisations,
    name   text not null,
    status text not null check (status in ('draft', 'published', 'live', 'closed', 'cancelled')),
    opens  timestamptz, -- of the sale
    closes timestamptz,
    check (opens < closes)
);

create table if not exists hall.blocks (
    id       uuid primary key,
    event    uuid not null references hall.events,
    position int  not null,
    name     text not null,
    cents    bigint not null,
    capacity bigint not null check (capacity >= 0), -- how many of its seats may be held or sold
    unique (event, position)
);

-- The first columns never change. The others are a copy of the library's holds, for the map: a subscriber writes them in
-- the transaction of each transition. The library decides: a seat with an expired hold is free, also while it shows as
-- held here.
create table if not exists hall.seats (
    id         uuid primary key,
    event      uuid not null references hall.events,
    block      uuid not null references hall.blocks,
    ordinal    int  not null, -- within the event: by block, row and number
    row        text not null,
    number     int  not null,
    state      text not null default 'free' check (state in ('free', 'held', 'sold', 'blocked')),
    hold       text,
    holder     text,
    held_until timestamptz,
    source     text, -- the sales channel that holds it
    unique (event, ordinal)
);

create table if not exists hall.orders (
    id      uuid primary key,
    org     uuid not null references hall.organisations,
    event   uuid not null references hall.events,
    buyer   uuid not null references hall.users,
    holds   text[] not null,
    cents   bigint not null,
    payment text not null,
    at      timestamptz not null default now()
);

-- The outcome of each request, and of each hold. A success is written in its own transaction, a failure on its own.
create table if not exists hall.audit (
    id        bigint generated always as identity primary key,
    at        timestamptz not null default metered.clock(),
    org       uuid not null,
    actor     text not null,
    action    text not null, -- the request, or the end of a hold by time
    code      text not null default '', -- of a failure
    event     uuid,
    block     uuid,
    seat      uuid,
    hold      text,
    operation text,
    address   text not null,
    agent     text not null,
    changes   jsonb not null -- of a failure: the request
);


create table if not exists hall.sessions (
    id      text primary key,
    person  uuid not null references hall.users on delete cascade,
    expires timestamptz not null
);
