package main

// shopSQL is the application's own: it knows nothing of the library. Money is in cents.
const shopSQL = `
create table items (
    sku   text primary key,
    cents bigint not null,
    stock int not null check (stock >= 0)
);
create table orders (
    account   text,
    id        text,                 -- chosen by the account
    sku       text not null references items,
    cents     bigint not null,
    entry     bigint not null,      -- the charge, in the ledger of the account
    cancelled timestamptz,
    primary key (account, id)
);
create table shipments (
    account  text,
    order_id text,
    address  text not null check (address <> ''),
    primary key (account, order_id)
)`
