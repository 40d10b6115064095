-- Version 2: the functions take other arguments; a line of a hold says how much of it was given back.
alter table metered.hold_lines add column refunded bigint not null default 0;
