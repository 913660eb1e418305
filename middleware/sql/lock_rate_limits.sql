-- Whoever sums up the keys of one family waits for the one before: a sum over rows that are not there yet locks nothing.
SELECT pg_advisory_xact_lock(hashtextextended('posthouse.rate_limits ' || %(family)s, 0))
