-- Leases are taken by one at a time, so that two batches never wait for each other's rows; ends with the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('posthouse.index_state', 0))
