-- Ended jobs only, oldest first, each kind by its stretch of the retention index. Materialised: a plan that ran the pick
-- again for each row would pick more than the batch.
WITH old AS MATERIALIZED (
    SELECT message_id
    FROM (
        SELECT message_id
        FROM dramatiq.queue
        WHERE state = 'done'
          AND finished_at < (SELECT clock_timestamp() - %(completed_s)s * interval '1 second')
        ORDER BY finished_at
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS completed
    UNION ALL
    SELECT message_id
    FROM (
        SELECT message_id
        FROM dramatiq.queue
        WHERE state = 'rejected'
          AND finished_at < (SELECT clock_timestamp() - %(failed_s)s * interval '1 second')
        ORDER BY finished_at
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS failed
    LIMIT %(limit)s
)
DELETE FROM dramatiq.queue q
USING old
WHERE q.message_id = old.message_id
  AND q.state IN ('done', 'rejected')
