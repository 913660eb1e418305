-- In the order they were made, over manual retries too.
SELECT attempt, worker_id::text, started_at, ended_at, outcome, error_class, error, traceback
FROM posthouse.attempts
WHERE job_id = %(id)s
ORDER BY id
