-- Deleted from the index and from the table: nothing is left to remember.
DELETE FROM posthouse.index_state
WHERE lease_token = %(token)s
  AND subject = ANY (%(ids)s)
  AND indexed_version = 0
