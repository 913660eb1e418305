-- Processes that ended without a word.
DELETE FROM posthouse.workers
WHERE seen_at < clock_timestamp() - %(unseen_s)s * interval '1 second'
