-- The row commits with the change it tells of; the notification is an empty doorbell.
WITH recorded AS (
    INSERT INTO posthouse.events (type, subject, data, endpoint_id)
    VALUES (%(type)s, %(subject)s, %(data)s::jsonb, %(endpoint_id)s::uuid)
    RETURNING id
)
SELECT id, pg_notify('posthouse_events', '')
FROM recorded
