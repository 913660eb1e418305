-- Only what counts as absent already; a row that somebody counts on just now is passed over.
WITH spent AS MATERIALIZED (
    SELECT key
    FROM posthouse.rate_limits
    WHERE expires_at <= clock_timestamp()
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM posthouse.rate_limits
WHERE key IN (SELECT key FROM spent)
  AND expires_at <= clock_timestamp()
