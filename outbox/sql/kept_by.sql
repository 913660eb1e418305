-- Whose a job is; the statements that act on it ask again.
SELECT message_id::text, lease_token::text, worker_id::text, queue_name, actor, attempt, max_attempts, snoozed_s,
       extract(epoch FROM clock_timestamp() - claimed_at)::double precision,
       extract(epoch FROM lease_until - clock_timestamp())::double precision,
       cancel_requested_at IS NOT NULL OR coalesce(deadline_at <= clock_timestamp(), false)
FROM dramatiq.queue
WHERE state = 'consumed'
  AND worker_id = ANY (%(worker_ids)s::uuid[])
