-- Whose leases hold a key: those that have not run out.
SELECT q.message_id::text AS id, q.queue_name AS queue, q.actor, q.worker_id::text, w.host, w.pid, q.lease_until
FROM dramatiq.queue q
LEFT JOIN posthouse.workers w ON w.id = q.worker_id
WHERE q.limit_key = %(key)s
  AND q.state = 'consumed'
  AND q.lease_until > clock_timestamp()
ORDER BY q.claimed_at
LIMIT %(limit)s
