-- A body is rendered once: every attempt, and every version of this program, sends the same bytes.
UPDATE posthouse.events
SET body = %(body)s
WHERE id = %(id)s
  AND body IS NULL
