-- In the caller's transaction. An id or a unique key that is there already changes nothing, whatever state its row is in;
-- a second insert of a key waits until the first one's transaction has ended. A column is a value for all the jobs or in
-- *own*, which is empty or has a record for each of them.
-- Commits that notify wait for each other, disk and all: of those in flight at once at most eight ring a queue's bell,
-- and the rest leave it to them and to the poll.
WITH inserted AS (
    INSERT INTO dramatiq.queue (
        message_id, queue_name, message, priority, available_at, created_at, max_attempts, unique_key, event_id,
        limit_key, limit_running, rate_per_s, rate_burst
    )
    SELECT (message ->> 'message_id')::uuid,
           message ->> 'queue_name',
           message,
           coalesce(own.priority, %(priority)s::integer),
           clock_timestamp() + coalesce(own.delay_s, %(delay_s)s::double precision) * interval '1 second',
           clock_timestamp(),
           coalesce(own.max_attempts, %(max_attempts)s::integer),
           own.unique_key,
           own.event_id,
           coalesce(own.limit_key, %(limit_key)s::text),
           coalesce(own.limit, %(limit)s::integer),
           coalesce(own.rate_per_s, %(rate_per_s)s::double precision),
           coalesce(own.rate_burst, %(rate_burst)s::integer)
    FROM ROWS FROM (
        jsonb_array_elements(%(messages)s::jsonb),
        jsonb_to_recordset(%(own)s::jsonb) AS (
            priority integer, delay_s double precision, max_attempts integer, unique_key text, event_id uuid,
            limit_key text, "limit" integer, rate_per_s double precision, rate_burst integer
        )
    ) AS own (
        message, priority, delay_s, max_attempts, unique_key, event_id, limit_key, "limit", rate_per_s, rate_burst
    )
    ON CONFLICT DO NOTHING
    RETURNING message_id, queue_name
),
rung AS (
    SELECT count(pg_notify('posthouse_q_' || bell, '')) AS bells
    FROM (SELECT DISTINCT queue_name FROM inserted) AS queues (bell)
    WHERE EXISTS (
        SELECT
        FROM generate_series(1, 8) AS place
        WHERE pg_try_advisory_xact_lock(hashtextextended('posthouse_q_' || bell, place))
    )
)
SELECT n, CASE WHEN n < %(count)s::bigint THEN (SELECT coalesce(string_agg(message_id::text, ' '), '') FROM inserted) END
FROM (SELECT count(*) AS n FROM inserted) AS counted, rung
