-- Ended jobs only, oldest first, each kind by its stretch of the retention index.
DELETE FROM dramatiq.queue
WHERE message_id IN (
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
  AND state IN ('done', 'rejected')
