-- Version 3: a sweep of one wallet reads what is to be told of it alone.
create index lots_untold on metered.lots (scope, expires_at, no) where untold > 0;
