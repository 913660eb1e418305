-- Delayed jobs are unfinished too. A look at each partial index, of those that wait without a key, with one, and run.
SELECT EXISTS (
    SELECT FROM dramatiq.queue
    WHERE queue_name = %(queue)s
      AND state = 'queued'
      AND limit_key IS NULL
) OR EXISTS (
    SELECT FROM dramatiq.queue
    WHERE queue_name = %(queue)s
      AND state = 'queued'
      AND limit_key IS NOT NULL
) OR EXISTS (
    SELECT FROM dramatiq.queue
    WHERE queue_name = %(queue)s
      AND state = 'consumed'
) AS unfinished
