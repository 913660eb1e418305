-- Committed, no claim takes a job of the queue until it is resumed or the time is over; paused again, the last word counts.
INSERT INTO posthouse.pauses AS p (queue_name, paused_by, reason, until_at)
VALUES (
    %(queue)s, %(by)s, %(reason)s, clock_timestamp() + %(until_s)s::double precision * interval '1 second'
)
ON CONFLICT (queue_name) DO UPDATE
SET paused_at = excluded.paused_at,
    paused_by = excluded.paused_by,
    reason = excluded.reason,
    until_at = excluded.until_at
