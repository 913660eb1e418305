-- How attempts ended, and the next jobs, in one commit: a claim loop never waits for one before it asks for the other.
--
-- Settle: the token and a lease that has not run out make the holder the only one who can end the attempt; a late result
-- matches nothing. Successes with nothing to tell come as two arrays, not as a join, which may be planned as a scan of
-- every leased row: a token is one claim's of one job, so a row whose token is among these is its owner's. The history is
-- written with the outcome, or not at all.
--
-- Claim: due jobs in priority and due order, past rows others are claiming, for as many as are wanted; none of a paused
-- queue, and none with a limit's key: a line without a token or an id says in which queues such jobs wait (claim_limited).
-- The ladder of priorities lets the index answer "due" for each of them, so neither a backlog nor delayed rows are scanned.
-- Their rows are found by an array of places, which hold while they are locked: a join may be planned as a hash over
-- every queued row. One random number of the caller's makes all tokens: some servers open a file for each of their own.
WITH RECURSIVE clock AS MATERIALIZED (
    SELECT clock_timestamp() AS at
),
completed AS (
    UPDATE dramatiq.queue q
    SET state = 'done',
        lease_token = NULL,
        lease_until = NULL,
        finished_at = clock_timestamp(),
        last_error = NULL,
        mtime = clock_timestamp()
    WHERE q.message_id = ANY (%(ids)s::uuid[])
      AND q.lease_token = ANY (%(tokens)s::uuid[])
      AND q.state = 'consumed'
      AND q.lease_until > clock_timestamp()
    RETURNING q.message_id
),
verdicts AS (
    SELECT *
    FROM json_to_recordset(%(verdicts)s::json) AS v (
        id uuid, token uuid, state text, delay_s double precision, refund integer, snoozed_s double precision,
        result text, outcome text, error_class text, error text, traceback text
    )
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
    WHERE q.message_id = ANY (ARRAY(SELECT id FROM verdicts))
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
),
wanted AS MATERIALIZED (
    SELECT w.key AS queue_name, w.value::integer AS n
    FROM json_each_text(%(wanted)s::json) AS w
    WHERE NOT EXISTS (
        SELECT
        FROM posthouse.pauses p
        WHERE p.queue_name = w.key AND (p.until_at IS NULL OR p.until_at > (SELECT at FROM clock))
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
        worker_id = %(worker_id)s::uuid,
        lease_token = left(encode(sha256((q.message_id::text || %(random)s::text)::bytea), 'hex'), 32)::uuid,
        lease_until = clock_timestamp() + %(lease_s)s::double precision * interval '1 second',
        claimed_at = clock_timestamp(),
        started_at = coalesce(q.started_at, clock_timestamp())
    WHERE q.ctid = ANY (ARRAY(SELECT ctid FROM due))
      AND q.state = 'queued'
    RETURNING q.message_id::text, q.lease_token::text, q.queue_name, q.actor, q.message::text, q.priority, q.attempt,
              q.max_attempts, q.snoozed_s, q.event_id::text, date_part('epoch', q.available_at),
              date_part('epoch', q.created_at)
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
UNION ALL
SELECT message_id::text, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM completed
UNION ALL
SELECT message_id::text, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM settled
