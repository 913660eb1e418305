-- Run after the insert that was refused, so it sees who was first: the id's own row, or the unfinished one of its key;
-- null when that one has ended since.
SELECT m.id::text, coalesce(
    (SELECT q.message_id FROM dramatiq.queue q WHERE q.message_id = m.id),
    (
        SELECT q.message_id
        FROM dramatiq.queue q
        WHERE q.unique_key = m.unique_key AND q.state IN ('queued', 'consumed')
    )
)::text
FROM jsonb_to_recordset(%(missed)s::jsonb) AS m (id uuid, unique_key text)
