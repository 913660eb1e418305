-- An older version never replaces a newer one, whoever comes late.
INSERT INTO posthouse.search_entries AS e (generation, id, kind, lang, tags, updated_at, version, tsv)
SELECT s.live_generation, d.id, d.kind, d.lang, ARRAY(SELECT jsonb_array_elements_text(d.tags)),
       d.updated_at, d.version, d.vector::tsvector
FROM unnest(
    %(ids)s::text[], %(kinds)s::text[], %(langs)s::text[], %(tags)s::jsonb[],
    %(updated_at)s::timestamptz[], %(versions)s::bigint[], %(vectors)s::text[]
) AS d (id, kind, lang, tags, updated_at, version, vector)
CROSS JOIN posthouse.search_state s
ORDER BY d.id
ON CONFLICT (generation, id) DO UPDATE
SET kind = excluded.kind, lang = excluded.lang, tags = excluded.tags,
    updated_at = excluded.updated_at, version = excluded.version, tsv = excluded.tsv
WHERE e.version <= excluded.version
