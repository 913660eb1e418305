-- Three missed signs of life, and a process is no longer shown as working.
SELECT id::text, host, pid, version, queues, threads, running, started_at, seen_at
FROM posthouse.workers
WHERE seen_at > clock_timestamp() - %(within_s)s * interval '1 second'
ORDER BY queues, host, pid
