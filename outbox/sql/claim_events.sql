-- State a row and SKIP LOCKED, never a position: a transaction that commits late is not passed over.
SELECT id::text, type, subject
FROM posthouse.events
WHERE fanned_out_at IS NULL
  AND poisoned_at IS NULL
ORDER BY seq
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED
