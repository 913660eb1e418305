-- Newest first, those that wait, run and have ended each by an index of their own: a transition writes only one of them.
-- An event's by the event. Those that wait by their columns: an index of created_at that named their state would be one
-- for claims too, and a ruinous one. No arguments, they may be large or private.
WITH newest AS (
    (
        SELECT message_id, created_at
        FROM dramatiq.queue
        WHERE finished_at IS NULL
          AND lease_token IS NULL
          AND %(event_id)s::uuid IS NULL
          AND (%(state)s::text IS NULL OR %(state)s IN ('pending', 'retryable'))
          AND (%(state)s::text IS NULL OR posthouse.shown_state(state, attempt, stop_cause) = %(state)s)
          AND (%(queue)s::text IS NULL OR queue_name = %(queue)s)
          AND (%(actor)s::text IS NULL OR actor = %(actor)s)
        ORDER BY created_at DESC, message_id DESC
        LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT message_id, created_at
        FROM dramatiq.queue
        WHERE state = 'consumed'
          AND %(event_id)s::uuid IS NULL
          AND (%(state)s::text IS NULL OR %(state)s = 'running')
          AND (%(queue)s::text IS NULL OR queue_name = %(queue)s)
          AND (%(actor)s::text IS NULL OR actor = %(actor)s)
        ORDER BY created_at DESC, message_id DESC
        LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT message_id, created_at
        FROM dramatiq.queue
        WHERE state IN ('done', 'rejected')
          AND %(event_id)s::uuid IS NULL
          AND (%(state)s::text IS NULL OR %(state)s IN ('completed', 'discarded', 'cancelled'))
          AND (%(state)s::text IS NULL OR posthouse.shown_state(state, attempt, stop_cause) = %(state)s)
          AND (%(queue)s::text IS NULL OR queue_name = %(queue)s)
          AND (%(actor)s::text IS NULL OR actor = %(actor)s)
        ORDER BY created_at DESC, message_id DESC
        LIMIT %(limit)s
    )
    UNION ALL
    (
        SELECT message_id, created_at
        FROM dramatiq.queue
        WHERE event_id = %(event_id)s::uuid
          AND (%(state)s::text IS NULL OR posthouse.shown_state(state, attempt, stop_cause) = %(state)s)
          AND (%(queue)s::text IS NULL OR queue_name = %(queue)s)
          AND (%(actor)s::text IS NULL OR actor = %(actor)s)
        ORDER BY created_at DESC, message_id DESC
        LIMIT %(limit)s
    )
)
SELECT q.message_id::text AS id, q.queue_name AS queue, q.actor,
       posthouse.shown_state(q.state, q.attempt, q.stop_cause) AS state,
       q.attempt, q.max_attempts, q.crashes, q.event_id::text, q.created_at, q.available_at, q.started_at, q.finished_at,
       q.last_error
FROM newest
JOIN dramatiq.queue q USING (message_id)
ORDER BY q.created_at DESC, q.message_id DESC
LIMIT %(limit)s
