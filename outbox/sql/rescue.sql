-- The row's own lease decides, or that its owner is known to be dead; looked at again in the update, whoever settles first
-- wins. A crash stays charged.
-- The first one is due at once, since mostly the process was to blame. After the second the suspects come one by one, so
-- that those who were only beside a job that kills get through before its third.
WITH expired AS MATERIALIZED (
    SELECT message_id, row_number() OVER (PARTITION BY crashes > 0) AS place
    FROM (
        SELECT message_id, crashes
        FROM dramatiq.queue
        WHERE state = 'consumed'
          AND (lease_until <= clock_timestamp() OR worker_id = ANY (%(dead)s::uuid[]))
        ORDER BY lease_until
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS locked
),
rescued AS (
    UPDATE dramatiq.queue q
    SET state = CASE
            WHEN q.cancel_requested_at IS NOT NULL
              OR q.deadline_at <= clock_timestamp()
              OR q.crashes + 1 >= %(max_crashes)s
              OR q.attempt >= q.max_attempts THEN 'rejected'::dramatiq.state
            ELSE 'queued'
        END,
        finished_at = CASE
            WHEN q.cancel_requested_at IS NOT NULL
              OR q.deadline_at <= clock_timestamp()
              OR q.crashes + 1 >= %(max_crashes)s
              OR q.attempt >= q.max_attempts THEN clock_timestamp()
        END,
        stop_cause = CASE
            WHEN q.cancel_requested_at IS NOT NULL
             AND (q.deadline_at IS NULL OR q.cancel_requested_at <= q.deadline_at) THEN 'cancel_requested'
            WHEN q.deadline_at <= clock_timestamp() THEN 'deadline_exceeded'
            WHEN q.cancel_requested_at IS NOT NULL THEN 'cancel_requested'
        END,
        available_at = CASE
            WHEN q.crashes = 0 THEN clock_timestamp()
            ELSE clock_timestamp() + 2 * expired.place * interval '1 second'
        END,
        crashes = q.crashes + 1,
        lease_token = NULL,
        lease_until = NULL,
        last_error = 'worker lost',
        mtime = clock_timestamp()
    FROM expired
    WHERE q.message_id = expired.message_id
      AND q.state = 'consumed'
      AND (q.lease_until <= clock_timestamp() OR q.worker_id = ANY (%(dead)s::uuid[]))
    RETURNING q.message_id, q.queue_name, q.state, q.attempt, q.worker_id, q.claimed_at
),
history AS (
    INSERT INTO posthouse.attempts (job_id, attempt, worker_id, started_at, outcome, error)
    SELECT message_id, attempt, worker_id, claimed_at, 'worker lost', CASE
            WHEN worker_id = ANY (%(dead)s::uuid[]) THEN 'its process died'
            ELSE 'the lease ran out without an answer'
        END
    FROM rescued
),
rung AS (
    SELECT count(pg_notify('posthouse_q_' || queue_name, '')) AS bells
    FROM (SELECT DISTINCT queue_name FROM rescued WHERE state = 'queued' AND octet_length(queue_name) <= 40) AS r
)
SELECT message_id::text, queue_name, state::text, bells
FROM rescued, rung
