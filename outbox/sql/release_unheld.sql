-- Claims whose answer got lost with the session: this process's rows under tokens it never saw. Nobody runs them.
WITH released AS (
    UPDATE dramatiq.queue
    SET state = 'queued',
        attempt = greatest(attempt - 1, 0),
        lease_token = NULL,
        lease_until = NULL,
        mtime = clock_timestamp()
    WHERE state = 'consumed'
      AND worker_id = %(worker_id)s
      AND lease_token <> ALL (%(tokens)s::uuid[])
    RETURNING message_id
)
SELECT message_id::text
FROM released
