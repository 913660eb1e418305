-- What searches can find.
SELECT count(*)
FROM posthouse.search_entries
WHERE generation = (SELECT live_generation FROM posthouse.search_state)
