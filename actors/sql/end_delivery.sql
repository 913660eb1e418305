-- A delivery that ends without a request; what was delivered stays delivered.
UPDATE posthouse.deliveries
SET
    result = %(result)s,
    finished_at = clock_timestamp(),
    parked_at = NULL
WHERE id = %(delivery_id)s
  AND result IS DISTINCT FROM 'delivered'
