-- Only what came from a file.
DELETE FROM posthouse.documents
WHERE id = ANY (%(ids)s)
  AND source IS NOT NULL
