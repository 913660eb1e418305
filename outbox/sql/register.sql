-- A row that somebody deleted comes back with the next sign of life.
INSERT INTO posthouse.workers AS w (id, host, pid, version, queues, threads, running)
VALUES (%(id)s, %(host)s, %(pid)s, %(version)s, %(queues)s, %(threads)s, %(running)s)
ON CONFLICT (id) DO UPDATE
SET running = excluded.running, seen_at = clock_timestamp()
