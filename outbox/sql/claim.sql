-- Due jobs in priority and due order, past rows others are claiming, for as many as are wanted; none of a paused queue, and
-- none with a limit's key: a line without an id says in which queues such jobs wait (claim_limited). The ladder of
-- priorities lets the index answer "due" for each of them, so neither a backlog nor delayed rows are scanned.
-- Their rows are found by an array of places, which hold while they are locked: a join may be planned as a hash over
-- every queued row. One random number of the caller's makes all tokens: some servers open a file for each of their own.
WITH RECURSIVE clock AS MATERIALIZED (
    SELECT clock_timestamp() AS at
),
wanted AS MATERIALIZED (
    SELECT w.queue_name, w.n
    FROM unnest(%(queues)s::text[], %(limits)s::integer[]) AS w (queue_name, n)
    WHERE NOT EXISTS (
        SELECT
        FROM posthouse.pauses p
        WHERE p.queue_name = w.queue_name AND (p.until_at IS NULL OR p.until_at > (SELECT at FROM clock))
    )
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
due AS MATERIALIZED (
    SELECT picked.ctid
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT step.ctid
        FROM ladder l
        CROSS JOIN LATERAL (
            SELECT q.ctid
            FROM dramatiq.queue q
            WHERE q.queue_name = l.queue_name
              AND q.state = 'queued'
              AND q.limit_key IS NULL
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
),
claimed AS (
    UPDATE dramatiq.queue q
    SET state = 'consumed',
        attempt = q.attempt + 1,
        worker_id = %(worker_id)s,
        lease_token = left(encode(sha256((q.message_id::text || %(random)s::text)::bytea), 'hex'), 32)::uuid,
        lease_until = clock_timestamp() + %(lease_s)s * interval '1 second',
        claimed_at = clock_timestamp(),
        started_at = coalesce(q.started_at, clock_timestamp())
    WHERE q.ctid = ANY (ARRAY(SELECT ctid FROM due))
      AND q.state = 'queued'
    RETURNING q.message_id::text, q.lease_token::text, q.queue_name, q.actor, q.message::text, q.priority, q.attempt,
              q.max_attempts, q.snoozed_s, q.event_id::text, extract(epoch FROM q.available_at)::double precision,
              extract(epoch FROM q.created_at)::double precision
)
SELECT *
FROM claimed
UNION ALL
SELECT NULL, NULL, w.queue_name, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM wanted w
WHERE (
    SELECT true
    FROM dramatiq.queue q
    WHERE q.queue_name = w.queue_name AND q.state = 'queued' AND q.limit_key IS NOT NULL
    LIMIT 1
)
