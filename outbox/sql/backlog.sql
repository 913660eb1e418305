-- Reads the partial index of waiting events only; the poisoned are few.
SELECT count(*) FILTER (WHERE poisoned_at IS NULL) AS waiting,
       coalesce(extract(epoch FROM clock_timestamp() - min(created_at) FILTER (WHERE poisoned_at IS NULL)), 0)::float
           AS oldest_s,
       count(*) FILTER (WHERE poisoned_at IS NOT NULL) AS poisoned
FROM posthouse.events
WHERE fanned_out_at IS NULL
