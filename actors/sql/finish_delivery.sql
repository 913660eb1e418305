-- Runs after release_endpoint found the lease ours, in its transaction: nobody else can end this delivery meanwhile.
UPDATE posthouse.deliveries
SET
    result = %(result)s,
    finished_at = CASE WHEN %(result)s::text IS NOT NULL THEN clock_timestamp() END,
    snoozes = CASE WHEN %(snoozed)s THEN snoozes + 1 ELSE 0 END
WHERE id = %(id)s
