package main

// serviceSQL is the application's own: it knows nothing of the library. A unit is a cent.
const serviceSQL = `
create table accounts (
    id     text primary key,
    plan   text not null,
    zone   text not null,        -- by name: an offset from UTC is wrong for half of the year
    since  timestamptz not null, -- the subscription's anchor: on the 31st means the last day of shorter months
    starts timestamptz not null, -- the month that has no invoice yet
    ends   timestamptz not null,
    lots   text not null,        -- the reference of the plan's lots of that month
    next   text not null         -- and of those of the month after it
);
create table renders (           -- what is sold
    account text references accounts,
    id      text,                -- chosen by the account
    units   bigint not null,
    entry   bigint not null,     -- the charge, in the ledger of the account
    primary key (account, id)
);
create table debts (             -- of payments that bounced, what had been spent
    account text references accounts,
    payment text,
    units   bigint not null,
    invoice timestamptz,         -- the month that it was billed with
    primary key (account, payment)
);
create table alerts (
    account text references accounts,
    month   timestamptz,
    name    text,
    used    bigint not null,
    primary key (account, month, name) -- a job may be worked twice
);
create table invoices (
    account text references accounts,
    starts  timestamptz,
    ends    timestamptz not null,
    total   bigint not null,
    lines   jsonb not null,
    primary key (account, starts)
)`
