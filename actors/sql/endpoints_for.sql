-- An endpoint hears of nothing that happened before it; the order keeps two fan-outs at once from a deadlock.
SELECT id::text, event_types
FROM posthouse.endpoints
WHERE enabled
  AND created_at <= %(created_at)s
ORDER BY id
