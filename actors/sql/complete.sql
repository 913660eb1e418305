-- Indexed means that the engine is done with it, under the token of the one who posted it.
UPDATE posthouse.index_state
SET indexed_version = posted_version, posted_version = NULL, task_uid = NULL, waits = 0, rejected = NULL
WHERE lease_token = %(token)s
  AND subject = ANY (%(ids)s)
  AND posted_version IS NOT NULL
