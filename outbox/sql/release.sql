-- Given back by its owner, without charge; a job nobody started keeps its place in the order.
WITH released AS (
    UPDATE dramatiq.queue q
    SET state = 'queued',
        attempt = greatest(q.attempt - 1, 0),
        available_at = CASE
            WHEN %(delay_s)s > 0 THEN clock_timestamp() + %(delay_s)s * interval '1 second'
            ELSE q.available_at
        END,
        lease_token = NULL,
        lease_until = NULL,
        mtime = clock_timestamp()
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS h (id, token)
    WHERE q.message_id = ANY (%(ids)s::uuid[])
      AND q.message_id = h.id
      AND q.lease_token = h.token
      AND q.state = 'consumed'
    RETURNING q.message_id, q.queue_name
),
rung AS (
    SELECT count(pg_notify('posthouse_q_' || queue_name, '')) AS bells
    FROM (SELECT DISTINCT queue_name FROM released WHERE octet_length(queue_name) <= 40) AS r
    WHERE %(delay_s)s = 0
)
SELECT message_id::text, bells
FROM released, rung
