-- The token makes the holder of the lease.
SELECT q.message_id::text
FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS h (id, token)
JOIN dramatiq.queue q ON q.message_id = h.id
WHERE q.message_id = ANY (%(ids)s::uuid[])
  AND q.state = 'consumed'
  AND q.lease_token = h.token
