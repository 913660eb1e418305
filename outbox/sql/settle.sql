-- The token and a lease that has not run out make the holder the only one who can end the attempt; a late result matches
-- nothing. The history is written with the outcome, or not at all.
WITH verdicts AS (
    SELECT *
    FROM unnest(
        %(id)s::uuid[], %(token)s::uuid[], %(state)s::text[], %(delay_s)s::double precision[], %(refund)s::integer[],
        %(snoozed_s)s::double precision[], %(result)s::text[], %(outcome)s::text[], %(error_class)s::text[],
        %(error)s::text[], %(traceback)s::text[]
    ) AS v (id, token, state, delay_s, refund, snoozed_s, result, outcome, error_class, error, traceback)
),
settled AS (
    UPDATE dramatiq.queue q
    SET state = v.state::dramatiq.state,
        attempt = greatest(q.attempt - v.refund, 0),
        available_at = CASE
            WHEN v.state = 'queued' THEN clock_timestamp() + v.delay_s * interval '1 second'
            ELSE q.available_at
        END,
        snoozed_s = q.snoozed_s + v.snoozed_s,
        lease_token = NULL,
        lease_until = NULL,
        finished_at = CASE WHEN v.state <> 'queued' THEN clock_timestamp() END,
        result = coalesce(v.result::jsonb, q.result),
        last_error = CASE WHEN v.state = 'done' THEN NULL ELSE coalesce(v.error, q.last_error) END,
        mtime = clock_timestamp()
    FROM verdicts v
    WHERE q.message_id = ANY (%(id)s::uuid[])
      AND q.message_id = v.id
      AND q.lease_token = v.token
      AND q.state = 'consumed'
      AND q.lease_until > clock_timestamp()
    RETURNING q.message_id, q.worker_id, q.claimed_at, q.attempt + v.refund AS attempt,
              v.outcome, v.error_class, v.error, v.traceback
),
history AS (
    INSERT INTO posthouse.attempts (
        job_id, attempt, worker_id, started_at, outcome, error_class, error, traceback
    )
    SELECT message_id, attempt, worker_id, claimed_at, outcome, error_class, error, traceback
    FROM settled
    WHERE outcome IS NOT NULL
)
SELECT message_id::text
FROM settled
