-- Ended jobs only, in small batches by the retention index.
DELETE FROM dramatiq.queue
WHERE message_id IN (
    SELECT message_id
    FROM dramatiq.queue
    WHERE (state = 'done' AND finished_at < clock_timestamp() - %(completed_s)s * interval '1 second')
       OR (state = 'rejected' AND finished_at < clock_timestamp() - %(failed_s)s * interval '1 second')
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
  AND state IN ('done', 'rejected')
