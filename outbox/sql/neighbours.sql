-- Only where a pid means the same as here.
SELECT id::text, pid, pid_started, extract(epoch FROM clock_timestamp() - seen_at)::double precision
FROM posthouse.workers
WHERE pid_space = %(pid_space)s
