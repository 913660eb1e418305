-- Claims whose answer got lost with the session: this process's rows under tokens it never saw. Nobody runs them. A row
-- that somebody has locked is left to its lease: it must not keep the process from claiming.
WITH unheld AS MATERIALIZED (
    SELECT message_id
    FROM dramatiq.queue
    WHERE state = 'consumed'
      AND worker_id = %(worker_id)s
      AND lease_token <> ALL (%(tokens)s::uuid[])
    FOR UPDATE SKIP LOCKED
),
released AS (
    UPDATE dramatiq.queue q
    SET state = 'queued',
        attempt = greatest(q.attempt - 1, 0),
        lease_token = NULL,
        lease_until = NULL,
        mtime = clock_timestamp()
    FROM unheld
    WHERE q.message_id = unheld.message_id
      AND q.state = 'consumed'
      AND q.worker_id = %(worker_id)s
    RETURNING q.message_id
)
SELECT message_id::text
FROM released
