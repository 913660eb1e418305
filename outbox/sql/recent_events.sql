-- Newest first, by the sequence; bodies stay where they are.
SELECT id::text, seq, type, subject, data, created_at, fanned_out_at, jobs, failures, last_error, poisoned_at
FROM posthouse.events
ORDER BY seq DESC
LIMIT %(limit)s
