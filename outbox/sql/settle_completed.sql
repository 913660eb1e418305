-- As settle, for attempts that succeeded and have nothing to tell. A token is one claim's of one job, so a row whose token
-- is among these is its owner's. Two arrays, not a join: that may be planned as a scan of every leased row.
UPDATE dramatiq.queue q
SET state = 'done',
    lease_token = NULL,
    lease_until = NULL,
    finished_at = clock_timestamp(),
    last_error = NULL,
    mtime = clock_timestamp()
WHERE q.message_id = ANY (%(ids)s::uuid[])
  AND q.lease_token = ANY (%(tokens)s::uuid[])
  AND q.state = 'consumed'
  AND q.lease_until > clock_timestamp()
RETURNING q.message_id::text
