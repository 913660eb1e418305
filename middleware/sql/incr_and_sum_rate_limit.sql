-- Under the family's lock: what the keys sum up to cannot change between the look and the insert.
INSERT INTO posthouse.rate_limits AS r (key, value, expires_at)
SELECT %(key)s, %(amount)s, clock_timestamp() + %(ttl_s)s * interval '1 second'
WHERE %(amount)s + (
    SELECT coalesce(sum(value), 0)
    FROM posthouse.rate_limits
    WHERE key = ANY (%(keys)s)
      AND expires_at > clock_timestamp()
) <= %(maximum)s
ON CONFLICT (key) DO UPDATE
SET value = CASE WHEN r.expires_at > clock_timestamp() THEN r.value ELSE 0 END + EXCLUDED.value,
    expires_at = EXCLUDED.expires_at
RETURNING r.key
