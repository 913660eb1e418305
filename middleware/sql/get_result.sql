-- What the ledger says of a job that has ended; the last attempt tells what was raised.
SELECT q.state::text AS state, q.result::text AS result, q.stop_cause, q.last_error,
       (
           SELECT a.error_class
           FROM posthouse.attempts a
           WHERE a.job_id = q.message_id
           ORDER BY a.id DESC
           LIMIT 1
       ) AS error_class
FROM dramatiq.queue q
WHERE q.message_id = %(id)s
  AND q.state IN ('done', 'rejected')
