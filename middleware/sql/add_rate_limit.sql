-- A key that is there and has not expired is left alone.
INSERT INTO posthouse.rate_limits AS r (key, value, expires_at)
VALUES (%(key)s, %(value)s, clock_timestamp() + %(ttl_s)s * interval '1 second')
ON CONFLICT (key) DO UPDATE
SET value = EXCLUDED.value,
    expires_at = EXCLUDED.expires_at
WHERE r.expires_at <= clock_timestamp()
RETURNING r.key
