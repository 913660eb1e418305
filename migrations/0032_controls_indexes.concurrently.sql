-- Waiting jobs with a key, a stretch a key: what is behind a full one is found by one step over it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_limited ON dramatiq.queue
    (queue_name, limit_key, priority, available_at, created_at)
WHERE state = 'queued' AND limit_key IS NOT NULL;

-- Why a job was put back.
CREATE INDEX CONCURRENTLY IF NOT EXISTS deliveries_waiting ON posthouse.deliveries (job_id)
WHERE parked_at IS NOT NULL;

-- Who holds a key. The lease is not in it: a renewal stays a heap-only update.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_holders ON dramatiq.queue (limit_key)
WHERE state = 'consumed' AND limit_key IS NOT NULL;
