-- One migrator at a time; the lock ends with its transaction.
SELECT pg_try_advisory_xact_lock(hashtextextended('posthouse.migrations', 0)) AS locked
