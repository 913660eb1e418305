-- Unfinished jobs by queue; reads the partial indexes of waiting and leased rows.
SELECT queue_name AS queue,
       count(*) FILTER (WHERE state = 'queued' AND available_at <= clock_timestamp()) AS due,
       count(*) FILTER (WHERE state = 'queued' AND available_at > clock_timestamp()) AS later,
       count(*) FILTER (WHERE state = 'consumed') AS running,
       count(*) FILTER (WHERE state = 'queued' AND attempt > 0) AS retryable,
       coalesce(
           extract(epoch FROM clock_timestamp() - min(available_at) FILTER (
               WHERE state = 'queued' AND available_at <= clock_timestamp()
           )), 0
       )::float AS oldest_s
FROM dramatiq.queue
WHERE state IN ('queued', 'consumed')
GROUP BY queue_name
ORDER BY queue_name
