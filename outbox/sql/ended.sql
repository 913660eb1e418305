-- What ended in the last hour, by queue; bounded by the retention index, which alone has these times.
SELECT q.queue_name AS queue,
       count(*) FILTER (WHERE q.state = 'done') AS completed,
       count(*) FILTER (WHERE q.state = 'rejected' AND q.stop_cause IS NULL) AS discarded,
       count(*) FILTER (WHERE q.state = 'rejected' AND q.stop_cause IS NOT NULL) AS cancelled
FROM (VALUES ('done'::dramatiq.state), ('rejected'::dramatiq.state)) AS ended (state)
JOIN dramatiq.queue q USING (state)
WHERE q.finished_at > statement_timestamp() - interval '1 hour'
GROUP BY q.queue_name
