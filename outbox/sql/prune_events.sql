-- Unfanned events stay, and so does what a delivery refers to: a redelivery always finds its event. Materialised: a plan
-- that ran the pick again for each row would pick more than the batch.
WITH old AS MATERIALIZED (
    SELECT e.id
    FROM posthouse.events e
    WHERE e.fanned_out_at < (SELECT clock_timestamp() - %(older_than_s)s * interval '1 second')
      AND NOT EXISTS (SELECT FROM posthouse.deliveries d WHERE d.event_id = e.id)
    ORDER BY e.fanned_out_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM posthouse.events e
USING old
WHERE e.id = old.id
