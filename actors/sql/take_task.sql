-- What was posted as one task is settled as one, as far as nobody else holds it.
UPDATE posthouse.index_state
SET lease_token = %(token)s, lease_until = clock_timestamp() + %(lease_s)s * interval '1 second'
WHERE task_uid = %(task)s
  AND subject <> %(subject)s
  AND (lease_until IS NULL OR lease_until <= clock_timestamp())
RETURNING subject
