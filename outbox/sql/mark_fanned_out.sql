-- In the transaction that made the jobs: an event has all of them, or waits.
UPDATE posthouse.events e
SET fanned_out_at = clock_timestamp(), jobs = f.jobs
FROM unnest(%(ids)s::uuid[], %(jobs)s::integer[]) AS f (id, jobs)
WHERE e.id = f.id
  AND e.fanned_out_at IS NULL
