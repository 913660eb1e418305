-- What runs is its owner's; what has ended stays as it ended.
DELETE FROM dramatiq.queue
WHERE queue_name = %(queue)s
  AND state = 'queued'
