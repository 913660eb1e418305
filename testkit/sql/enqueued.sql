-- In the order in which they were asked for, whatever has become of them.
SELECT message_id::text AS id, queue_name AS queue, actor,
       posthouse.shown_state(state, attempt, stop_cause) AS state,
       message -> 'args' AS args, message -> 'kwargs' AS kwargs, priority, unique_key, limit_key,
       extract(epoch FROM available_at - clock_timestamp())::double precision AS due_in_s
FROM dramatiq.queue
WHERE %(actor)s::text IS NULL OR actor = %(actor)s
ORDER BY created_at, available_at, message_id
