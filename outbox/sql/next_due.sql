-- The next due time of each queue, a step of the claim index for each priority; with a key, one for each of its
-- priorities, up to a number: what lies beyond is found by the poll.
WITH RECURSIVE wanted AS (
    SELECT w.queue_name
    FROM unnest(%(queues)s::text[]) AS w (queue_name)
),
ladder (queue_name, priority) AS (
    SELECT w.queue_name, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name AND q.state = 'queued' AND q.limit_key IS NULL
        ORDER BY q.priority
        LIMIT 1
    )
    FROM wanted w
    UNION ALL
    SELECT l.queue_name, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name AND q.state = 'queued' AND q.limit_key IS NULL AND q.priority > l.priority
        ORDER BY q.priority
        LIMIT 1
    )
    FROM ladder l
    WHERE l.priority IS NOT NULL
),
keyed_ladder (queue_name, limit_key, priority, step) AS (
    SELECT w.queue_name, first.limit_key, first.priority, 1
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT q.limit_key, q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name AND q.state = 'queued' AND q.limit_key IS NOT NULL
        ORDER BY q.limit_key, q.priority
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT l.queue_name, next.limit_key, next.priority, l.step + 1
    FROM keyed_ladder l
    CROSS JOIN LATERAL (
        SELECT q.limit_key, q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name
          AND q.state = 'queued'
          AND q.limit_key IS NOT NULL
          AND (q.limit_key, q.priority) > (l.limit_key, l.priority)
        ORDER BY q.limit_key, q.priority
        LIMIT 1
    ) AS next
    WHERE l.step < 50
),
nexts AS (
    SELECT l.queue_name, next.available_at
    FROM ladder l
    CROSS JOIN LATERAL (
        SELECT q.available_at
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name
          AND q.state = 'queued'
          AND q.limit_key IS NULL
          AND q.priority = l.priority
          AND q.available_at > (SELECT clock_timestamp())
        ORDER BY q.available_at
        LIMIT 1
    ) AS next
    UNION ALL
    SELECT l.queue_name, next.available_at
    FROM keyed_ladder l
    CROSS JOIN LATERAL (
        SELECT q.available_at
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name
          AND q.state = 'queued'
          AND q.limit_key = l.limit_key
          AND q.priority = l.priority
          AND q.available_at > (SELECT clock_timestamp())
        ORDER BY q.available_at
        LIMIT 1
    ) AS next
)
SELECT queue_name, extract(epoch FROM min(available_at) - clock_timestamp())::double precision
FROM nexts
GROUP BY queue_name
