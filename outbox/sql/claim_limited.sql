-- Never more of a key than its limit and its tokens: their number is counted here, under the keys' locks, in a snapshot
-- that is younger than those. Of each queue the best due jobs are taken in one order, with a key or without.
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
steps AS MATERIALIZED (
    SELECT s.queue_name, s.limit_key, s.priority, least(w.n, s.room) AS n
    FROM unnest(
        %(step_queues)s::text[], %(step_keys)s::text[], %(step_priorities)s::integer[], %(step_rooms)s::bigint[]
    ) AS s (queue_name, limit_key, priority, room)
    JOIN wanted w USING (queue_name)
),
keys AS MATERIALIZED (
    SELECT k.limit_key, (
        SELECT count(*)
        FROM dramatiq.queue q
        WHERE q.limit_key = k.limit_key AND q.state = 'consumed' AND q.lease_until > (SELECT at FROM clock)
    ) AS held
    FROM (SELECT DISTINCT limit_key FROM steps) AS k
),
buckets AS MATERIALIZED (
    SELECT b.key, b AS bucket
    FROM posthouse.buckets b
    WHERE b.key = ANY (ARRAY(SELECT limit_key FROM keys))
    FOR UPDATE SKIP LOCKED
),
waiting AS MATERIALIZED (
    SELECT job.*
    FROM steps s
    CROSS JOIN LATERAL (
        SELECT q.message_id, q.queue_name, q.limit_key, q.priority, q.available_at, q.created_at, q.limit_running,
               q.rate_per_s, q.rate_burst
        FROM dramatiq.queue q
        WHERE q.queue_name = s.queue_name
          AND q.state = 'queued'
          AND q.limit_key = s.limit_key
          AND q.priority = s.priority
          AND q.available_at <= (SELECT at FROM clock)
          AND (q.deadline_at IS NULL OR q.deadline_at > (SELECT at FROM clock))
        ORDER BY q.available_at, q.created_at
        LIMIT s.n
        FOR UPDATE SKIP LOCKED
    ) AS job
),
lined_up AS (
    SELECT waiting.*, row_number() OVER line AS place, count(rate_per_s) OVER line AS rated
    FROM waiting
    WINDOW line AS (
        PARTITION BY limit_key
        ORDER BY priority, available_at, created_at, message_id
        ROWS UNBOUNDED PRECEDING
    )
),
allowed AS (
    SELECT l.message_id, l.queue_name, l.limit_key, l.priority, l.available_at, l.created_at, l.rate_per_s, l.rate_burst
    FROM lined_up l
    JOIN keys k USING (limit_key)
    CROSS JOIN clock
    LEFT JOIN buckets b ON b.key = l.limit_key
    WHERE (l.limit_running IS NULL OR k.held + l.place <= l.limit_running)
      AND (
          l.rate_per_s IS NULL
          OR (
              l.rated <= posthouse.tokens(b.bucket, l.rate_per_s, l.rate_burst, clock.at)
              AND (b.key IS NOT NULL OR NOT EXISTS (SELECT FROM posthouse.buckets c WHERE c.key = l.limit_key))
          )
      )
),
free_ladder (queue_name, n, priority) AS (
    SELECT w.queue_name, w.n, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name AND q.state = 'queued' AND q.limit_key IS NULL
        ORDER BY q.priority
        LIMIT 1
    )
    FROM wanted w
    UNION ALL
    SELECT l.queue_name, l.n, (
        SELECT q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name AND q.state = 'queued' AND q.limit_key IS NULL AND q.priority > l.priority
        ORDER BY q.priority
        LIMIT 1
    )
    FROM free_ladder l
    WHERE l.priority IS NOT NULL
),
free AS MATERIALIZED (
    SELECT picked.*
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT job.*
        FROM free_ladder l
        CROSS JOIN LATERAL (
            SELECT q.message_id, q.queue_name, q.priority, q.available_at, q.created_at
            FROM dramatiq.queue q
            WHERE q.queue_name = l.queue_name
              AND q.state = 'queued'
              AND q.limit_key IS NULL
              AND q.priority = l.priority
              AND q.available_at <= (SELECT at FROM clock)
              AND (q.deadline_at IS NULL OR q.deadline_at > (SELECT at FROM clock))
            ORDER BY q.available_at, q.created_at
            LIMIT l.n
            FOR UPDATE SKIP LOCKED
        ) AS job
        WHERE l.queue_name = w.queue_name
        LIMIT w.n
    ) AS picked
),
taken AS MATERIALIZED (
    SELECT best.*
    FROM (
        SELECT both_kinds.*, row_number() OVER (
            PARTITION BY queue_name
            ORDER BY priority, available_at, created_at
        ) AS place
        FROM (
            SELECT message_id, queue_name, limit_key, priority, available_at, created_at, rate_per_s, rate_burst
            FROM allowed
            UNION ALL
            SELECT message_id, queue_name, NULL, priority, available_at, created_at, NULL, NULL
            FROM free
        ) AS both_kinds
    ) AS best
    JOIN wanted w USING (queue_name)
    WHERE best.place <= w.n
),
spent AS (
    INSERT INTO posthouse.buckets AS b (key, tokens, refilled_at, full_at)
    SELECT s.limit_key, s.tokens, clock.at,
           clock.at + least((s.burst - s.tokens) / greatest(s.rate_per_s, 1e-9), 3e9) * interval '1 second'
    FROM (
        SELECT t.limit_key, min(t.rate_per_s) AS rate_per_s, max(t.rate_burst) AS burst,
               greatest(0, min(posthouse.tokens(b.bucket, t.rate_per_s, t.rate_burst, clock.at)) - count(*)) AS tokens
        FROM taken t
        CROSS JOIN clock
        LEFT JOIN buckets b ON b.key = t.limit_key
        WHERE t.rate_per_s IS NOT NULL
        GROUP BY t.limit_key
    ) AS s
    CROSS JOIN clock
    ON CONFLICT (key) DO UPDATE
    SET tokens = excluded.tokens, refilled_at = excluded.refilled_at, full_at = excluded.full_at
)
UPDATE dramatiq.queue q
SET state = 'consumed',
    attempt = q.attempt + 1,
    worker_id = %(worker_id)s,
    lease_token = gen_random_uuid(),
    lease_until = (SELECT at FROM clock) + %(lease_s)s * interval '1 second',
    claimed_at = (SELECT at FROM clock),
    started_at = coalesce(q.started_at, (SELECT at FROM clock))
WHERE q.message_id = ANY (ARRAY(SELECT message_id FROM taken))
  AND q.state = 'queued'
RETURNING q.message_id::text, q.lease_token::text, q.queue_name, q.actor, q.message::text, q.priority, q.attempt,
          q.max_attempts, q.snoozed_s, q.event_id::text, extract(epoch FROM q.available_at)::double precision,
          extract(epoch FROM q.created_at)::double precision
