-- The process that answers; a pooler told the client of another one when it connected.
SELECT pg_backend_pid() AS pid
