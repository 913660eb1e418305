-- For this transaction only: the connection goes back to its pool as it was.
SELECT set_config('statement_timeout', %(limit_ms)s, true)
