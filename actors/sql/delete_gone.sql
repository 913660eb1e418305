-- Only what came from a file of this collection that is no longer there.
DELETE FROM posthouse.documents d
WHERE split_part(d.source, '/', 1) = %(collection)s
  AND NOT EXISTS (SELECT FROM unnest(%(sources)s::text[]) AS s (source) WHERE s.source = d.source)
