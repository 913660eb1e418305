-- A row that somebody deleted comes back with the next sign of life.
INSERT INTO posthouse.workers AS w (id, host, pid, pid_space, pid_started, version, queues, actors, threads, running)
VALUES (%(id)s, %(host)s, %(pid)s, %(pid_space)s, %(pid_started)s, %(version)s, %(queues)s, %(actors)s, %(threads)s,
        %(running)s)
ON CONFLICT (id) DO UPDATE
SET running = excluded.running, seen_at = clock_timestamp()
