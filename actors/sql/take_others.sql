-- Among the next 1,000 changes after this one those farthest away: their own jobs come last, so nobody meets them.
WITH later AS (
    SELECT d.id, d.version, least(octet_length(d.body), 800000) AS size
    FROM posthouse.documents d
    WHERE d.version > (SELECT version FROM posthouse.documents WHERE id = %(subject)s)
    ORDER BY d.version
    LIMIT 1000
),
free AS (
    SELECT later.id, later.version, sum(later.size) OVER (ORDER BY later.version DESC) AS total
    FROM later
    LEFT JOIN posthouse.index_state s ON s.subject = later.id
    WHERE s.indexed_version IS DISTINCT FROM later.version
      AND s.task_uid IS NULL
      AND (s.lease_until IS NULL OR s.lease_until <= clock_timestamp())
)
INSERT INTO posthouse.index_state AS s (subject, lease_token, lease_until)
SELECT id, %(token)s, clock_timestamp() + %(lease_s)s * interval '1 second'
FROM free
WHERE total <= %(most_bytes)s
ORDER BY version DESC
LIMIT %(limit)s
ON CONFLICT (subject) DO UPDATE
SET lease_token = excluded.lease_token, lease_until = excluded.lease_until
WHERE s.lease_until IS NULL
   OR s.lease_until <= clock_timestamp()
RETURNING subject
