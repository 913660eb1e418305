-- Unfinished jobs by queue, each kind by its partial index: those that wait, with and without a key, and those leased.
WITH unfinished AS (
    SELECT queue_name, available_at, attempt, false AS leased
    FROM dramatiq.queue
    WHERE state = 'queued' AND limit_key IS NULL
    UNION ALL
    SELECT queue_name, available_at, attempt, false
    FROM dramatiq.queue
    WHERE state = 'queued' AND limit_key IS NOT NULL
    UNION ALL
    SELECT queue_name, available_at, attempt, true
    FROM dramatiq.queue
    WHERE state = 'consumed'
)
SELECT queue_name AS queue,
       count(*) FILTER (WHERE NOT leased AND available_at <= clock_timestamp()) AS due,
       count(*) FILTER (WHERE NOT leased AND available_at > clock_timestamp()) AS later,
       count(*) FILTER (WHERE leased) AS running,
       count(*) FILTER (WHERE NOT leased AND attempt > 0) AS retryable,
       coalesce(
           extract(epoch FROM clock_timestamp() - min(available_at) FILTER (
               WHERE NOT leased AND available_at <= clock_timestamp()
           )), 0
       )::float AS oldest_s
FROM unfinished
GROUP BY queue_name
ORDER BY queue_name
