-- The row decides what is shown: a hit whose row is gone or hidden is dropped by its caller.
SELECT id, kind, title, left(body, 200000) AS body
FROM posthouse.documents
WHERE id = ANY (%(ids)s)
  AND visible
