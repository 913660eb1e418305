-- Whoever holds this lock sees, in the next statement, what the one before left.
SELECT e.id
FROM posthouse.endpoints e
JOIN posthouse.deliveries d ON d.endpoint_id = e.id
WHERE d.id = %(delivery_id)s
FOR NO KEY UPDATE OF e
