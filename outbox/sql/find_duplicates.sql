-- Run after the insert that was refused, so it sees who was first: the id's own row, or the unfinished one of its key.
SELECT n.id::text, q.message_id::text
FROM unnest(%(ids)s::uuid[], %(unique_keys)s::text[]) AS n (id, unique_key)
JOIN dramatiq.queue q
  ON q.message_id = n.id
  OR (q.unique_key = n.unique_key AND q.state IN ('queued', 'consumed'))
