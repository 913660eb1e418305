-- A dead process stays on the register until the last job it held has been rescued.
WITH dead AS (
    SELECT w.id
    FROM unnest(%(worker_ids)s::uuid[]) AS w (id)
    WHERE NOT EXISTS (SELECT FROM dramatiq.queue q WHERE q.state = 'consumed' AND q.worker_id = w.id)
),
struck AS (
    DELETE FROM posthouse.workers w
    USING dead
    WHERE w.id = dead.id
)
SELECT id::text
FROM dead
