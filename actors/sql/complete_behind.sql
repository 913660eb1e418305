-- The row moved on while its older version was being indexed.
SELECT s.subject
FROM posthouse.index_state s
LEFT JOIN posthouse.documents d ON d.id = s.subject
WHERE s.lease_token = %(token)s
  AND s.subject = ANY (%(ids)s)
  AND s.indexed_version <> coalesce(d.version, 0)
