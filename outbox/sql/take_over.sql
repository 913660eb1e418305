-- New tokens make the taker the only one who can end these attempts. All of them or none: none once the job that is the
-- reason has ended, changed hands or is locked.
WITH held AS MATERIALIZED (
    SELECT message_id, lease_token
    FROM dramatiq.queue
    WHERE state = 'consumed'
      AND worker_id = %(worker_id)s
      AND lease_until > clock_timestamp()
    FOR UPDATE SKIP LOCKED
)
UPDATE dramatiq.queue q
SET worker_id = %(to)s,
    lease_token = gen_random_uuid(),
    lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
FROM held
WHERE q.message_id = held.message_id
  AND q.lease_token = held.lease_token
  AND EXISTS (SELECT FROM held WHERE lease_token = ANY (%(tokens)s::uuid[]))
RETURNING q.message_id::text, q.lease_token::text, q.worker_id::text, q.queue_name, q.actor, q.attempt, q.max_attempts,
          q.snoozed_s, extract(epoch FROM clock_timestamp() - q.claimed_at)::double precision,
          %(lease_s)s::double precision,
          q.cancel_requested_at IS NOT NULL OR coalesce(q.deadline_at <= clock_timestamp(), false)
