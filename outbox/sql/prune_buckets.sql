-- A full bucket is what a key without one has.
WITH full_ones AS MATERIALIZED (
    SELECT key
    FROM posthouse.buckets
    WHERE full_at < clock_timestamp()
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM posthouse.buckets b
USING full_ones f
WHERE b.key = f.key
  AND b.full_at < clock_timestamp()
