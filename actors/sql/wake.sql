-- A free endpoint does not keep its parked deliveries waiting: the longest parked one is due now, and rings.
WITH woken AS (
    UPDATE dramatiq.queue
    SET available_at = clock_timestamp()
    WHERE message_id = (
        SELECT q.message_id
        FROM posthouse.deliveries d
        JOIN dramatiq.queue q ON q.message_id = d.job_id
        WHERE d.endpoint_id = %(endpoint_id)s
          AND d.parked_at IS NOT NULL
          AND q.state = 'queued'
          AND q.available_at > clock_timestamp()
        ORDER BY d.parked_at
        LIMIT 1
        FOR UPDATE OF q SKIP LOCKED
    )
    RETURNING message_id
)
SELECT pg_notify(%(channel)s, '')
FROM woken
