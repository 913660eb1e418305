-- One word of a title outweighs any number of the same word in a body, of which at most 255 count.
SELECT e.id, ts_rank_cd('{0.002, 0.1, 0.4, 1}', e.tsv, %(query)s::tsquery)::float AS score
FROM posthouse.search_entries e
WHERE e.generation = (SELECT live_generation FROM posthouse.search_state)
  AND e.tsv @@ %(query)s::tsquery
  AND (%(kind)s::text IS NULL OR e.kind = %(kind)s)
  AND (%(lang)s::text IS NULL OR e.lang = %(lang)s)
  AND (%(tag)s::text IS NULL OR e.tags @> ARRAY[%(tag)s::text])
ORDER BY score DESC, e.updated_at DESC, e.id
LIMIT %(limit)s
OFFSET %(offset)s
