-- Claim order, due time included, for jobs without a limit's key; those with one have queue_limited.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_due ON dramatiq.queue (queue_name, priority, available_at, created_at)
WHERE state = 'queued' AND limit_key IS NULL;

-- Lists for people, newest first; those that run are few.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_waiting ON dramatiq.queue (created_at)
WHERE state = 'queued';

CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_past ON dramatiq.queue (created_at)
WHERE state IN ('done', 'rejected');
