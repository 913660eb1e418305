-- A member counts once, however often it runs; the row lock lets exactly the last one see none left, and it again when
-- it runs again. The barrier lives on as long as members come.
WITH arrived AS (
    INSERT INTO posthouse.rate_limits (key, value, expires_at)
    SELECT %(barrier)s || '@' || %(member)s, 1, clock_timestamp() + %(ttl_s)s * interval '1 second'
    FROM posthouse.rate_limits
    WHERE key = %(barrier)s
    ON CONFLICT (key) DO NOTHING
    RETURNING key
)
UPDATE posthouse.rate_limits
SET value = value - (SELECT count(*) FROM arrived),
    expires_at = clock_timestamp() + %(ttl_s)s * interval '1 second'
WHERE key = %(barrier)s
RETURNING value
