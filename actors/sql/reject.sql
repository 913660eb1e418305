-- This version will never be in the index: it counts as dealt with, and says why.
UPDATE posthouse.index_state s
SET indexed_version = refused.version, posted_version = NULL, task_uid = NULL, waits = 0, rejected = refused.reason
FROM unnest(%(ids)s::text[], %(versions)s::bigint[], %(reasons)s::text[]) AS refused (id, version, reason)
WHERE s.subject = refused.id
  AND s.lease_token = %(token)s
