-- A document that did not come from a file is never overwritten; in order of ids, so that two imports cannot deadlock.
INSERT INTO posthouse.documents AS d (id, source, content_sha256, kind, title, body, tags, lang, visible)
SELECT p.id, p.source, p.hash, p.kind, p.title, p.body, ARRAY(SELECT jsonb_array_elements_text(p.tags)),
       p.lang, p.visible
FROM unnest(
    %(ids)s::text[], %(sources)s::text[], %(hashes)s::text[], %(kinds)s::text[], %(titles)s::text[],
    %(bodies)s::text[], %(tags)s::jsonb[], %(langs)s::text[], %(visible)s::boolean[]
) AS p (id, source, hash, kind, title, body, tags, lang, visible)
ORDER BY p.id
ON CONFLICT (id) DO UPDATE
SET source = excluded.source, content_sha256 = excluded.content_sha256, kind = excluded.kind,
    title = excluded.title, body = excluded.body, tags = excluded.tags, lang = excluded.lang,
    visible = excluded.visible
WHERE d.source IS NOT NULL
RETURNING id, xmax = 0 AS is_new
