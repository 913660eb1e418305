-- Due jobs in priority and due order, past rows others are claiming, for as many as are wanted. The ladder of priorities
-- lets the index answer "due" for each of them, so neither a backlog nor delayed rows are scanned.
-- Their rows are found by an array of ids: a join may be planned as a hash over every queued row.
WITH RECURSIVE wanted AS (
    SELECT queue_name, n
    FROM unnest(%(queues)s::text[], %(limits)s::integer[]) AS w (queue_name, n)
),
clock AS MATERIALIZED (
    SELECT clock_timestamp() AS at
),
ladder (queue_name, priority) AS (
    SELECT w.queue_name, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name AND q.state = 'queued'
        ORDER BY q.priority
        LIMIT 1
    )
    FROM wanted w
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
),
due AS MATERIALIZED (
    SELECT picked.message_id
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT step.message_id
        FROM ladder l
        CROSS JOIN LATERAL (
            SELECT q.message_id
            FROM dramatiq.queue q
            WHERE q.queue_name = l.queue_name
              AND q.state = 'queued'
              AND q.priority = l.priority
              AND q.available_at <= (SELECT at FROM clock)
              AND (q.deadline_at IS NULL OR q.deadline_at > (SELECT at FROM clock))
            ORDER BY q.available_at, q.created_at
            LIMIT w.n
            FOR UPDATE SKIP LOCKED
        ) AS step
        WHERE l.queue_name = w.queue_name
        LIMIT w.n
    ) AS picked
)
UPDATE dramatiq.queue q
SET state = 'consumed',
    attempt = q.attempt + 1,
    worker_id = %(worker_id)s,
    lease_token = gen_random_uuid(),
    lease_until = clock_timestamp() + %(lease_s)s * interval '1 second',
    claimed_at = clock_timestamp(),
    started_at = coalesce(q.started_at, clock_timestamp())
WHERE q.message_id = ANY (ARRAY(SELECT message_id FROM due))
  AND q.state = 'queued'
RETURNING q.message_id::text, q.lease_token::text, q.queue_name, q.message::text, q.priority, q.attempt, q.max_attempts,
          q.snoozed_s, q.event_id::text, q.available_at, q.created_at
