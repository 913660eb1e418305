-- An expired lease is never revived, and a row that a commit of its owner holds just now is passed over.
UPDATE dramatiq.queue q
SET lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
FROM (
    SELECT r.message_id
    FROM unnest(%(ids)s::uuid[], %(tokens)s::uuid[]) AS h (id, token)
    JOIN dramatiq.queue r ON r.message_id = h.id
    WHERE r.message_id = ANY (%(ids)s::uuid[])
      AND r.state = 'consumed'
      AND r.lease_token = h.token
      AND r.lease_until > clock_timestamp()
    FOR UPDATE OF r SKIP LOCKED
) AS mine
WHERE q.message_id = mine.message_id
  AND q.lease_until > clock_timestamp()
RETURNING q.message_id::text, q.cancel_requested_at IS NOT NULL
