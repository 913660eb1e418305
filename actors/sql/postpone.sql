-- The task stays open: the next attempt asks after the same one.
UPDATE posthouse.index_state
SET waits = waits + 1
WHERE lease_token = %(token)s
  AND subject = ANY (%(ids)s)
