-- Those in force; a pause whose time is over is as good as none.
SELECT queue_name AS queue, paused_at, paused_by, reason, until_at
FROM posthouse.pauses
WHERE until_at IS NULL OR until_at > clock_timestamp()
ORDER BY queue_name
