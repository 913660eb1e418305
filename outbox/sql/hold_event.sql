-- Empty when another relay was faster.
SELECT id::text, type, subject
FROM posthouse.events
WHERE id = %(id)s
  AND fanned_out_at IS NULL
  AND poisoned_at IS NULL
FOR UPDATE SKIP LOCKED
