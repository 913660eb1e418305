-- What was posted is known before anybody waits for it, so that a later attempt asks after it and posts nothing twice.
UPDATE posthouse.index_state s
SET posted_version = posted.version, task_uid = %(task)s, waits = 0
FROM unnest(%(ids)s::text[], %(versions)s::bigint[]) AS posted (id, version)
WHERE s.subject = posted.id
  AND s.lease_token = %(token)s
