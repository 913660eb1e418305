-- From the generation that answers searches.
DELETE FROM posthouse.search_entries
WHERE generation = (SELECT live_generation FROM posthouse.search_state)
  AND id = ANY (%(ids)s)
