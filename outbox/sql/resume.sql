-- The bell rings with the commit, so that what waited starts at once.
WITH resumed AS (
    DELETE FROM posthouse.pauses
    WHERE queue_name = %(queue)s
    RETURNING queue_name, until_at IS NULL OR until_at > clock_timestamp() AS held
)
SELECT held, pg_notify('posthouse_q_' || queue_name, '')
FROM resumed
