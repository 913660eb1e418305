-- Looked at and changed under one row lock, so that the minimum holds whoever else counts at the same time.
UPDATE posthouse.rate_limits
SET value = value - %(amount)s,
    expires_at = clock_timestamp() + %(ttl_s)s * interval '1 second'
WHERE key = %(key)s
  AND expires_at > clock_timestamp()
  AND value - %(amount)s >= %(minimum)s
RETURNING key
