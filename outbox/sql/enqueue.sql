-- In the caller's transaction. An id or a unique key that is there already changes nothing, whatever state its row is in;
-- a second insert of a key waits until the first one's transaction has ended. One notification a queue, for the bells
-- that are due.
WITH inserted AS (
    INSERT INTO dramatiq.queue (
        message_id, queue_name, message, priority, available_at, created_at, max_attempts, unique_key, event_id
    )
    SELECT id, queue_name, message::jsonb, priority, clock_timestamp() + delay_s * interval '1 second',
           clock_timestamp(), max_attempts, unique_key, event_id
    FROM unnest(
        %(ids)s::uuid[], %(queues)s::text[], %(messages)s::text[], %(priorities)s::integer[],
        %(delays_s)s::double precision[], %(max_attempts)s::integer[], %(unique_keys)s::text[], %(event_ids)s::uuid[]
    ) AS n (id, queue_name, message, priority, delay_s, max_attempts, unique_key, event_id)
    ON CONFLICT DO NOTHING
    RETURNING message_id, queue_name
),
rung AS (
    SELECT count(pg_notify('posthouse_q_' || bell, '')) AS bells
    FROM unnest(%(ring)s::text[]) AS bell
    WHERE EXISTS (SELECT FROM inserted WHERE queue_name = bell)
)
SELECT message_id::text, bells
FROM inserted, rung
