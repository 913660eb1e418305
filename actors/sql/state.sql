-- Equal versions, nothing under way; no row at all matches no state at all.
SELECT CASE
    WHEN d.id IS NULL THEN s.subject IS NULL
    ELSE coalesce(s.indexed_version = d.version AND s.task_uid IS NULL, false)
END AS is_current, s.rejected
FROM (VALUES (%(subject)s)) AS wanted (subject)
LEFT JOIN posthouse.documents d ON d.id = wanted.subject
LEFT JOIN posthouse.index_state s ON s.subject = wanted.subject
