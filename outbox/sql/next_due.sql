-- The next due time of each queue, a step of the claim index for each priority.
WITH RECURSIVE ladder (queue_name, priority) AS (
    SELECT w.queue_name, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name AND q.state = 'queued'
        ORDER BY q.priority
        LIMIT 1
    )
    FROM unnest(%(queues)s::text[]) AS w (queue_name)
    UNION ALL
    SELECT l.queue_name, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name AND q.state = 'queued' AND q.priority > l.priority
        ORDER BY q.priority
        LIMIT 1
    )
    FROM ladder l
    WHERE l.priority IS NOT NULL
)
SELECT l.queue_name, extract(epoch FROM min(next.available_at) - clock_timestamp())::double precision
FROM ladder l
CROSS JOIN LATERAL (
    SELECT q.available_at
    FROM dramatiq.queue q
    WHERE q.queue_name = l.queue_name
      AND q.state = 'queued'
      AND q.priority = l.priority
      AND q.available_at > (SELECT clock_timestamp())
    ORDER BY q.available_at
    LIMIT 1
) AS next
GROUP BY l.queue_name
