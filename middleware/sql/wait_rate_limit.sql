-- An event is a key that is there.
SELECT key
FROM posthouse.rate_limits
WHERE key = %(key)s
  AND expires_at > clock_timestamp()
