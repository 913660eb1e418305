-- Claim order, due time included: neither a backlog nor delayed rows are sorted or scanned.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_claim ON dramatiq.queue (queue_name, priority, available_at, created_at)
WHERE state = 'queued';

-- Leased jobs by id: a renewal moves lease_until, which no index holds, so it stays a heap-only update.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_leased ON dramatiq.queue (message_id)
WHERE state = 'consumed';

-- The database says no to a second unfinished job of one key, on every path.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS queue_unique ON dramatiq.queue (unique_key)
WHERE state IN ('queued', 'consumed') AND unique_key IS NOT NULL;

-- Retention, oldest first.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_ended ON dramatiq.queue (state, finished_at)
WHERE state IN ('done', 'rejected');

-- Lists for people, newest first, by keyset.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_listing ON dramatiq.queue (created_at, message_id);

-- An event's jobs.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_event ON dramatiq.queue (event_id)
WHERE event_id IS NOT NULL;
