-- All that may keep one job from running, at one moment of the database's clock. Jobs before it are counted up to a number.
SELECT q.message_id::text AS id, q.queue_name AS queue, q.actor, q.state::text AS raw_state,
       posthouse.shown_state(q.state, q.attempt, q.stop_cause) AS state,
       q.attempt, q.max_attempts, q.available_at, q.claimed_at, q.finished_at, q.deadline_at, q.lease_until,
       q.stop_cause, q.last_error, q.limit_key, q.limit_running, q.rate_per_s, clock.at AS now,
       q.worker_id::text, w.host, w.pid,
       p.paused_at, p.paused_by, p.reason AS pause_reason, p.until_at AS paused_until,
       workers.working, workers.knowing, held.jobs AS held,
       posthouse.tokens(b, q.rate_per_s, q.rate_burst, clock.at) AS tokens,
       ahead.jobs AS ahead, waits.waits_for, rival.id AS unique_rival
FROM dramatiq.queue q
CROSS JOIN LATERAL (SELECT clock_timestamp() AS at) AS clock
LEFT JOIN posthouse.workers w ON w.id = q.worker_id
LEFT JOIN posthouse.pauses p ON p.queue_name = q.queue_name AND (p.until_at IS NULL OR p.until_at > clock.at)
LEFT JOIN posthouse.buckets b ON b.key = q.limit_key
CROSS JOIN LATERAL (
    SELECT count(*) AS working,
           count(*) FILTER (WHERE q.actor IS NULL OR a.actors IS NULL OR q.actor = ANY (a.actors)) AS knowing
    FROM posthouse.workers a
    WHERE q.queue_name = ANY (a.queues)
      AND a.seen_at > clock.at - %(heard_within_s)s * interval '1 second'
) AS workers
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM dramatiq.queue h
    WHERE h.limit_key = q.limit_key
      AND h.state = 'consumed'
      AND h.lease_until > clock.at
) AS held
CROSS JOIN LATERAL (
    SELECT count(*) AS jobs
    FROM (
        (
            SELECT
            FROM dramatiq.queue f
            WHERE f.queue_name = q.queue_name
              AND f.state = 'queued'
              AND f.limit_key IS NULL
              AND (f.priority, f.available_at, f.created_at) < (q.priority, q.available_at, q.created_at)
              AND f.available_at <= clock.at
            ORDER BY f.priority, f.available_at, f.created_at
            LIMIT %(count_to)s
        )
        UNION ALL
        (
            SELECT
            FROM dramatiq.queue f
            WHERE f.queue_name = q.queue_name
              AND f.state = 'queued'
              AND f.limit_key IS NOT NULL
              AND (f.priority, f.available_at, f.created_at) < (q.priority, q.available_at, q.created_at)
              AND f.available_at <= clock.at
            LIMIT %(count_to)s
        )
        LIMIT %(count_to)s
    ) AS f
) AS ahead
LEFT JOIN posthouse.waits ON waits.job_id = q.message_id
LEFT JOIN LATERAL (
    SELECT r.message_id::text AS id
    FROM dramatiq.queue r
    WHERE r.unique_key = q.unique_key
      AND r.state IN ('queued', 'consumed')
      AND r.message_id <> q.message_id
) AS rival ON true
WHERE q.message_id = %(id)s
