-- Ended jobs only, oldest first, each kind by its stretch of the retention index. The states are no constants, which old
-- statistics may know nothing of; what is locked is found by its place, which holds as long. Materialised: a plan that ran
-- the pick again for each row would pick more than the batch.
WITH old AS MATERIALIZED (
    SELECT ctid
    FROM (
        SELECT ctid
        FROM dramatiq.queue
        WHERE state = (SELECT 'done'::dramatiq.state)
          AND finished_at < (SELECT clock_timestamp() - %(completed_s)s * interval '1 second')
        ORDER BY finished_at
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS completed
    UNION ALL
    SELECT ctid
    FROM (
        SELECT ctid
        FROM dramatiq.queue
        WHERE state = (SELECT 'rejected'::dramatiq.state)
          AND finished_at < (SELECT clock_timestamp() - %(failed_s)s * interval '1 second')
        ORDER BY finished_at
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS failed
    LIMIT %(limit)s
)
DELETE FROM dramatiq.queue q
WHERE q.ctid = ANY (ARRAY(SELECT ctid FROM old))
