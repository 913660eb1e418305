-- A person's decision: only from discarded, with fresh attempts; the history stays. The state is cast so that only the id
-- finds the row, whatever the statistics say of how many are rejected.
WITH retried AS (
    UPDATE dramatiq.queue
    SET state = 'queued',
        attempt = 0,
        crashes = 0,
        snoozed_s = 0,
        available_at = clock_timestamp(),
        finished_at = NULL,
        cancel_requested_at = NULL,
        cancel_requested_by = NULL,
        cancel_reason = NULL,
        mtime = clock_timestamp()
    WHERE message_id = %(id)s
      AND state::text = 'rejected'
      AND stop_cause IS NULL
    RETURNING message_id, queue_name
)
SELECT message_id::text, CASE WHEN octet_length(queue_name) <= 40 THEN pg_notify('posthouse_q_' || queue_name, '') END
FROM retried
