-- Newest first by the listing index; no arguments, they may be large or private.
SELECT message_id::text AS id, queue_name AS queue, actor,
       posthouse.shown_state(state, attempt, stop_cause) AS state,
       attempt, max_attempts, crashes, event_id::text, created_at, available_at, started_at, finished_at, last_error
FROM dramatiq.queue
WHERE (%(state)s::text IS NULL OR posthouse.shown_state(state, attempt, stop_cause) = %(state)s)
  AND (%(queue)s::text IS NULL OR queue_name = %(queue)s)
  AND (%(actor)s::text IS NULL OR actor = %(actor)s)
  AND (%(event_id)s::uuid IS NULL OR event_id = %(event_id)s::uuid)
ORDER BY created_at DESC, message_id DESC
LIMIT %(limit)s
