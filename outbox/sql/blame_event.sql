-- Counts a failure of this event alone; the last one allowed takes it off the road.
UPDATE posthouse.events
SET failures = failures + 1,
    last_error = %(error)s,
    poisoned_at = CASE WHEN failures + 1 >= %(poisoned_after)s THEN clock_timestamp() END
WHERE id = %(id)s
  AND fanned_out_at IS NULL
  AND poisoned_at IS NULL
RETURNING poisoned_at IS NOT NULL AS poisoned
