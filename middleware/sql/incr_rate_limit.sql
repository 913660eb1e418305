-- Looked at and changed under one row lock, so that the maximum holds whoever else counts at the same time.
INSERT INTO posthouse.rate_limits AS r (key, value, expires_at)
SELECT %(key)s, %(amount)s, clock_timestamp() + %(ttl_s)s * interval '1 second'
WHERE %(amount)s <= %(maximum)s
ON CONFLICT (key) DO UPDATE
SET value = CASE WHEN r.expires_at > clock_timestamp() THEN r.value ELSE 0 END + EXCLUDED.value,
    expires_at = EXCLUDED.expires_at
WHERE CASE WHEN r.expires_at > clock_timestamp() THEN r.value ELSE 0 END + EXCLUDED.value <= %(maximum)s
RETURNING r.key
