-- Only a poisoned event goes back, with a clean record, so that it is fanned out once.
UPDATE posthouse.events
SET poisoned_at = NULL, failures = 0
WHERE id = %(id)s
  AND poisoned_at IS NOT NULL
  AND fanned_out_at IS NULL
