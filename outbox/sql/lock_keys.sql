-- Whoever holds the lock on a key until the transaction ends is the only one who may count its holders and take its
-- tokens, which is for the next statement: it sees what the one before has committed. The ladder steps over a key, however
-- many jobs wait there, and over those not due; keys that look full or empty, or that somebody else has locked, are left.
-- A line for each priority of a locked key; then one a queue: where its ladder was cut, and seconds until a token drips or
-- whoever has locked a key will be done.
WITH RECURSIVE clock AS MATERIALIZED (
    SELECT clock_timestamp() AS at
),
wanted AS MATERIALIZED (
    SELECT w.queue_name, w.n, w.after
    FROM unnest(%(queues)s::text[], %(limits)s::integer[], %(after)s::text[]) AS w (queue_name, n, after)
    WHERE w.n > 0
      AND NOT EXISTS (
          SELECT
          FROM posthouse.pauses p
          WHERE p.queue_name = w.queue_name AND (p.until_at IS NULL OR p.until_at > (SELECT at FROM clock))
      )
),
ladder (queue_name, limit_key, priority, step) AS (
    SELECT w.queue_name, first.limit_key, first.priority, 1
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT q.limit_key, q.priority
        FROM dramatiq.queue q
        WHERE q.queue_name = w.queue_name
          AND q.state = 'queued'
          AND q.limit_key > w.after
        ORDER BY q.limit_key, q.priority
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT l.queue_name, next.limit_key, next.priority, l.step + 1
    FROM ladder l
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
    WHERE l.step < %(steps)s
),
due AS MATERIALIZED (
    SELECT l.queue_name, l.limit_key, l.priority, head.*
    FROM ladder l
    CROSS JOIN LATERAL (
        SELECT q.available_at, q.created_at, q.limit_running, q.rate_per_s, q.rate_burst
        FROM dramatiq.queue q
        WHERE q.queue_name = l.queue_name
          AND q.state = 'queued'
          AND q.limit_key = l.limit_key
          AND q.priority = l.priority
          AND q.available_at <= (SELECT at FROM clock)
          AND (q.deadline_at IS NULL OR q.deadline_at > (SELECT at FROM clock))
        ORDER BY q.available_at, q.created_at
        LIMIT 1
    ) AS head
),
heads AS MATERIALIZED (
    SELECT h.*, h.limit_running - held.jobs AS places, posthouse.tokens(b, h.rate_per_s, h.rate_burst, clock.at) AS tokens
    FROM (SELECT DISTINCT ON (limit_key) * FROM due ORDER BY limit_key, priority, available_at, created_at) AS h
    CROSS JOIN clock
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs
        FROM dramatiq.queue q
        WHERE q.limit_key = h.limit_key AND q.state = 'consumed' AND q.lease_until > clock.at
    ) AS held
    LEFT JOIN posthouse.buckets b ON b.key = h.limit_key
),
open AS MATERIALIZED (
    SELECT limit_key, least(places, floor(tokens)::bigint) AS room
    FROM heads
    WHERE coalesce(places, 1) >= 1 AND coalesce(tokens, 1) >= 1
    ORDER BY priority, available_at, created_at
),
most AS MATERIALIZED (
    SELECT sum(n) + %(spare)s AS keys
    FROM wanted
),
locked AS MATERIALIZED (
    SELECT limit_key, room
    FROM open
    WHERE pg_try_advisory_xact_lock(hashtextextended(limit_key, 0))
    LIMIT (SELECT keys FROM most)
),
missed AS MATERIALIZED (
    SELECT (SELECT count(*) FROM locked) < least((SELECT keys FROM most), (SELECT count(*) FROM open)) AS any_key
)
SELECT due.queue_name, due.limit_key, due.priority, locked.room, NULL::double precision AS again_in_s
FROM due
JOIN locked USING (limit_key)
UNION ALL
SELECT w.queue_name,
       (SELECT l.limit_key FROM ladder l WHERE l.queue_name = w.queue_name AND l.step = %(steps)s),
       NULL,
       NULL,
       least(
           (
               SELECT min((floor(h.tokens) + 1 - h.tokens) / greatest(h.rate_per_s, 1e-9))
               FROM heads h
               JOIN due d USING (limit_key)
               WHERE d.queue_name = w.queue_name AND coalesce(h.places, 1) >= 1
           ),
           CASE WHEN missed.any_key THEN %(missed_s)s END
       )
FROM wanted w
CROSS JOIN missed
