-- What ended in the last hour, by queue; bounded by the retention index.
SELECT queue_name AS queue,
       count(*) FILTER (WHERE state = 'done') AS completed,
       count(*) FILTER (WHERE state = 'rejected' AND stop_cause IS NULL) AS discarded,
       count(*) FILTER (WHERE state = 'rejected' AND stop_cause IS NOT NULL) AS cancelled
FROM dramatiq.queue
WHERE state IN ('done', 'rejected')
  AND finished_at > statement_timestamp() - interval '1 hour'
GROUP BY queue_name
