-- Only a free lease, or one whose holder let it run out, changes hands.
INSERT INTO posthouse.index_state AS s (subject, lease_token, lease_until)
VALUES (%(subject)s, %(token)s, clock_timestamp() + %(lease_s)s * interval '1 second')
ON CONFLICT (subject) DO UPDATE
SET lease_token = excluded.lease_token, lease_until = excluded.lease_until
WHERE s.lease_until IS NULL
   OR s.lease_until <= clock_timestamp()
RETURNING task_uid, waits, EXISTS (SELECT FROM posthouse.documents d WHERE d.id = s.subject) AS has_row
