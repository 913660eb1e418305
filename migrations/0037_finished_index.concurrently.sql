-- An index that names a state may be taken by whatever asks for that state, and is when old statistics say that there are
-- next to none: what scans it then reads them all. So of the indexes of one state all but one name it otherwise.

-- Retention, and what ended lately.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_finished ON dramatiq.queue (state, finished_at)
WHERE finished_at IS NOT NULL;

-- Lists of those that wait, newest first: state = 'queued' in the words of the constraints.
CREATE INDEX CONCURRENTLY IF NOT EXISTS queue_newest ON dramatiq.queue (created_at)
WHERE finished_at IS NULL AND lease_token IS NULL;
