-- Every transition of every job pays for each index, so only those stay that something needs.

-- queue_due and queue_limited have taken its place.
DROP INDEX IF EXISTS dramatiq.queue_claim;

-- And queue_waiting and queue_past that of this one.
DROP INDEX IF EXISTS dramatiq.queue_listing;

-- dramatiq-pg's own: its purge finds old rows by queue_ended as well.
DROP INDEX IF EXISTS dramatiq.queue_state_mtime_idx;
