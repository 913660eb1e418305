-- The documents of one collection, as its last import left them.
SELECT id, source, content_sha256
FROM posthouse.documents
WHERE split_part(source, '/', 1) = %(collection)s
