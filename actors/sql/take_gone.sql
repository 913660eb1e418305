-- Of the next 1,000 subjects those without a row: what is deleted together leaves the index together.
WITH next AS (
    SELECT n.subject, n.task_uid
    FROM posthouse.index_state n
    WHERE n.subject > %(subject)s
    ORDER BY n.subject
    LIMIT 1000
),
gone AS (
    SELECT next.subject
    FROM next
    LEFT JOIN posthouse.documents d ON d.id = next.subject
    WHERE d.id IS NULL
      AND next.task_uid IS NULL
    LIMIT %(limit)s
)
UPDATE posthouse.index_state s
SET lease_token = %(token)s, lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
FROM gone
WHERE s.subject = gone.subject
  AND (s.lease_until IS NULL OR s.lease_until <= clock_timestamp())
RETURNING s.subject
