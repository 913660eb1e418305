-- The task had no effect, so what it posted counts as never posted.
UPDATE posthouse.index_state
SET posted_version = NULL, task_uid = NULL, waits = 0
WHERE lease_token = %(token)s
  AND subject = ANY (%(ids)s)
