package main

// shopSQL is the application's own: it knows nothing of the library. Money is in cents.
const shopSQL = `
create table items (
    sku   text primary key,
    cents bigint not null,
    stock int not null check (stock >= 0)
);
create table orders (
    id        text primary key,
    account   text not null,
    sku       text not null references items,
    cents     bigint not null,
    entry     bigint not null,      -- the charge, in the ledger of the account
    cancelled timestamptz
);
create table shipments (
    order_id text primary key,
    address  text not null check (address <> '')
)`
