-- One job as people see it.
SELECT message_id::text AS id, queue_name AS queue, actor,
       posthouse.shown_state(state, attempt, stop_cause) AS state,
       priority, attempt, max_attempts, crashes, unique_key, limit_key, event_id::text, worker_id::text,
       created_at, available_at, started_at, claimed_at, lease_until, finished_at, deadline_at,
       cancel_requested_at, cancel_requested_by, stop_cause, progress, last_error,
       message::text AS message, result::text AS result
FROM dramatiq.queue
WHERE message_id = %(id)s
