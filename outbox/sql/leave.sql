-- Said by the process itself, at the end of an orderly stop.
DELETE FROM posthouse.workers
WHERE id = %(id)s
