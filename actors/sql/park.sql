-- A parked delivery waits for its endpoint; the first time it was parked is kept.
UPDATE posthouse.deliveries
SET parked_at = coalesce(parked_at, clock_timestamp())
WHERE id = %(delivery_id)s
