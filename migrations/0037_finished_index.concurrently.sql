-- Retention, and what ended lately. It does not name the states: an index that does, in another order, cannot be taken
-- in its place when the statistics say that next to nothing has ended.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_finished ON dramatiq.queue (state, finished_at)
WHERE finished_at IS NOT NULL;
