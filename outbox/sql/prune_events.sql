-- Unfanned events stay, and so does what a delivery refers to: a redelivery always finds its event.
DELETE FROM posthouse.events
WHERE id IN (
    SELECT e.id
    FROM posthouse.events e
    WHERE e.fanned_out_at < (SELECT clock_timestamp() - %(older_than_s)s * interval '1 second')
      AND NOT EXISTS (SELECT FROM posthouse.deliveries d WHERE d.event_id = e.id)
    ORDER BY e.fanned_out_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
