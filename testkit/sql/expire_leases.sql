-- As if the holder had not renewed for longer than its lease.
UPDATE dramatiq.queue
SET lease_until = clock_timestamp()
WHERE message_id = ANY (%(ids)s::uuid[])
  AND state = 'consumed'
