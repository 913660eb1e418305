-- One event, whole.
SELECT id::text, seq, type, subject, data, endpoint_id::text, body, created_at,
       fanned_out_at, jobs, failures, last_error, poisoned_at
FROM posthouse.events
WHERE id = %(id)s
