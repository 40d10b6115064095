package ledger

// EndSQL asks for the end of the log, as the text of an LSN.
//
// The insert position is where the next record will begin. If the last one filled its page to the
// end, that is behind the header of the next page. No record ends there, so a standby would reach
// it only after the next write. So it is put back to the page's beginning. The header is 24 bytes,
// and 40 at the beginning of a segment.
const EndSQL = `
select case when (l.lsn - '0/0') % pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size'))::numeric = 40::numeric then l.lsn - 40::numeric
            when (l.lsn - '0/0') % pg_catalog.current_setting('wal_block_size')::numeric = 24::numeric then l.lsn - 24::numeric
            else l.lsn end::text
from pg_catalog.pg_current_wal_insert_lsn() l(lsn)`
